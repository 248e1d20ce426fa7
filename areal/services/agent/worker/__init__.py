"""The worker of an agent service: loads one agent, and runs its turns.

turn            the events of a turn, and what an agent's result means
agents          the forms of an agent: contract, functions, workflows
command         an agent that is a program
openai_agents   an agent of the OpenAI Agents SDK
tools           tools of MCP servers
agent_loop      the event loop of the agent's code, on a thread of its own
app             the worker's routes and its process

What ``agent`` names may be

- a class with ``run(request, *, emitter)``, as ``areal.api.agent`` has it, made with ``kwargs``; or an instance of one
- an object with ``run(data, **extra)``, as workflows take (``areal.api.workflow_api``): ``data`` has the request's
  metadata, and history and message as ``messages``; ``extra`` has base_url, api_key and model of the session, and an
  http_client; what it returns is kept as the metadata ``reward``
- a function of ``request``, of ``data`` or of the message, whose further parameters are what they are named for:
  ``emitter, tools, history, session_key, run_id, metadata, base_url, api_key, model``, or one of ``kwargs``

Each may be plain instead of async: then it runs on a thread, with an emitter of plain methods. A thread cannot be
cancelled: its turn ends at once for its caller, the thread when it next emits something, or returns. Where it does not
within five seconds, the worker starts anew as soon as no other turn runs.
"""
