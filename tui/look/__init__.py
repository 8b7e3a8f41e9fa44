"""Polling of jobs and devices, in threads. Independent of widgets."""
