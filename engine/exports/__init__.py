"""Exports: what was trained, in the formats that stock tools load, read back before it counts.

`source` says where tensors come from, `recipe` what is exported; `lora` and `model` write it,
`readback` and `stock` prove it, `place` gives it its name. `live` exports the model in training,
`python -m engine.exports` a checkpoint.
"""
