"""Servers under traffic that shifts from code to prose and back."""
