"""Prompts, answers written by the target, and the data sets made of them."""
