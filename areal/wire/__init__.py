"""What crosses a process boundary: pure, typed values that both ends import, and their JSON.

Standard library only: the command line, supervisors and every service import them at their start.
"""
