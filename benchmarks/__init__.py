"""Measurements, each compared with a peer program in the same run.

Speed is measured here, never asserted in a test.
"""
