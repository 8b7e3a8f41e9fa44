"""What people do with LoRA files: look at them, merge, resize and extract them.

`lora_file` reads and writes one, `kinds` guesses which model one is for, `combine` makes LoRAs of
LoRAs, `models` and `into_model` add them to a model's weights, `extract` goes the other way.
Models are read and written one layer at a time; `python -m engine.loras` is the tool.
"""
