"""Imported by verl's processes in the arm `both` of `benchmarks.teachers`: the policy's training pass is read beside
engines that record requests (`drafter.mode: dedicated`), so that a head learns from both.
"""

from __future__ import annotations

from rollspec_verl import teacher

teacher.MODES = ("policy", "dedicated")
