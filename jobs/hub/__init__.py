"""Models and datasets of the Hugging Face hub: fetched by a process of its own, pushed by another.

`huggingface_hub` is imported by those processes, and by a look into its cache.
"""
