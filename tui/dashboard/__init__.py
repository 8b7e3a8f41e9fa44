"""The main screen: devices, jobs, the selected job, its log and its loss curve."""
