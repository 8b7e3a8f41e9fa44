"""Export trained weights in formats that stock tools load, and verify each file after writing.

`source` reads tensors, `recipe` says what to export; `lora`, `model` and `single_file` write it,
`readback` and `stock` verify it, and `writing` puts it in place. `live` exports the model in
training, `python -m engine.exports` a checkpoint.
"""
