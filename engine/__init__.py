"""The code that runs on every rank: build, shard, load, adapt, plan, train, save."""
