"""Tests: unit/ mirrors the tree, integration/ starts our servers, e2e/ starts real engines, chaos/ breaks things."""
