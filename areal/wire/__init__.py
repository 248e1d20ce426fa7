"""Values that cross a process boundary, and their JSON: pure, typed, imported by both ends.

Standard library only: the command line, supervisors and every service import them at their start.
"""
