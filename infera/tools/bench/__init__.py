"""Measurements. Each prints a table and, last, one JSON object; raw results go to `bench/results/`."""
