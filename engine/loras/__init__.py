"""Tools for LoRA files: inspect, merge, resize and extract them.

`lora_file` reads and writes LoRA files, `kinds` detects the model family, `combine` merges and
resizes LoRAs, `models` and `into_model` add them to a model's weights, and `extract` does the
reverse. Models are read and written one layer at a time. The tool is `python -m engine.loras`.
"""
