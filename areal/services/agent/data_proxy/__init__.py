"""The data proxy of one pair of an agent service: keeps sessions in journals, and has its worker run their turns.

journal      sessions and turns on disk
inference    the RL sessions that their model calls are recorded in
worker       the worker, and what it answers
turns        the turns of each session, one after the other
routes       sessions and turns over HTTP
process      the process, wired together
"""
