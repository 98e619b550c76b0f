"""The cache map in plain Python: slow, and easy to believe. What the C map is compared with."""
