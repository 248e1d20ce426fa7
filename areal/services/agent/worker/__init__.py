"""The worker of an agent service: loads one agent, and runs its turns.

The setting ``agent`` names one of

- a class with ``run(request, *, emitter)`` (``areal.api.agent``), constructed with ``kwargs``; or an instance of one
- an object with ``run(data, **extra)``, as for workflows (``areal.api.workflow_api``): ``data`` has the request's
  metadata, and history and message as ``messages``; ``extra`` has base_url, api_key and model of the session, and an
  http_client; the result is stored as the metadata ``reward``
- a function of ``request``, of ``data`` or of the message; further parameters are passed by name:
  ``emitter, tools, history, session_key, run_id, metadata, base_url, api_key, model``, or one of ``kwargs``

Each may be synchronous instead of async: then it runs on a thread, with a synchronous emitter. A thread cannot be
cancelled: a cancelled turn ends at once for its caller, and its thread ends when it next emits an event or returns. If
it has not ended within five seconds, the worker restarts as soon as no other turn runs.
"""
