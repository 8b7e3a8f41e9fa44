"""Monitor several machines without a scheduler: each reports over ssh. No machine runs a new
service.
"""
