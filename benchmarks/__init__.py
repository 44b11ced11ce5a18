"""Measurements, as ratios against a peer in the same run. Speed belongs here and never into a
test.
"""
