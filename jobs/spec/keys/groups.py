"""The headings of the keys, grouped for the reference and subdivided for the form."""

from typing import Final

from jobs.spec.values.field import Group

DATA: Final = Group("data")
REGULARIZATION: Final = Group("data", "regularization and masks")
CAPTIONS: Final = Group("data", "captions")
CACHES: Final = Group("data", "text encoders and caches")
DEVICES: Final = Group("devices")
RUNNING: Final = Group("running")
LAUNCH: Final = Group("devices", "accelerate launch")
EXPORT: Final = Group("export")
FSDP: Final = Group("fsdp")
HUB: Final = Group("hub")
JOB: Final = Group("job")
LORA: Final = Group("lora")
OUTPUT: Final = Group("output")
SLURM: Final = Group("slurm")
TRACKING: Final = Group("tracking")
TRAINING: Final = Group("training")
OPTIMIZER: Final = Group("training", "optimizer and schedule")
SPEED: Final = Group("training", "memory and speed")
NOISE: Final = Group("training", "noise and loss")
EMA: Final = Group("training", "moving average")
VALIDATION: Final = Group("validation")
VALIDATION_LOSS: Final = Group("validation", "validation loss")
VALIDATION_SCORES: Final = Group("validation", "scores of samples")
