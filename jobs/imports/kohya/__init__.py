"""Kohya's two trainers, sd-scripts and musubi-tuner, which share most of their keys."""
