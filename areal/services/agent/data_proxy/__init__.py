"""The data proxy of one pair of an agent service: stores sessions in journals, runs their turns on the pair's worker.

journal      sessions and turns on disk
inference    the RL sessions that record the model calls of sessions
worker       client of the pair's worker, and parser of its events
turns        the queue of turns of each session
app          sessions and turns over HTTP, and the process's construction
"""
