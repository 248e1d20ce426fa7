"""A batch of rollouts through a gateway's session routes: data set in, trajectories and their summary out.

::

    examples --episodes--> workers: start -> agent -> reward -> export -> write (on disk) -> acknowledge
                              ^ failures are typed and tried again; they never become a reward

An episode is named by the number of its example and of its sample, so that a run that was killed at any point goes on
where it stopped: what is in the output is done, what was exported and not acknowledged is exported again with the same
answer, and what was half-way is dropped and sampled anew.
"""
