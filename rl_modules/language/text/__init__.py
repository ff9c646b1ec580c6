"""Texts: chat templates rendered, tried and encoded as tokens."""
