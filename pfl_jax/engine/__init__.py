"""Rounds: who takes part, every client's work on one device or many, and states on disk or in host memory."""
