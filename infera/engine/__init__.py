"""Launchers and the agent that stands beside an engine."""
