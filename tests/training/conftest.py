"""Training's tests share the machine: how long an example takes says nothing."""

from hypothesis import settings

settings.register_profile("shared-machine", deadline=None)
settings.load_profile("shared-machine")
