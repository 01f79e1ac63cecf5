"""Tuning: which values of a policy's parameters are better, on the same requests, and confirmed."""
