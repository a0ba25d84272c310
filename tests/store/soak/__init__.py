"""Tests of the disk tier."""
