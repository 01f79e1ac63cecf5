"""Drills: something is broken on purpose, and what becomes of it is measured."""
