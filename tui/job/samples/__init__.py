"""Samples of a job on the screen: a grid of prompts and steps, and single images."""
