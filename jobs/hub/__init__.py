"""Download models and datasets from the Hugging Face hub, and push results, in separate processes.

Only those processes, and reads of the cache, import `huggingface_hub`.
"""
