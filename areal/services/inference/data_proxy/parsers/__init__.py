"""From an answer's text to content, reasoning and tool calls, for each family of models.

Pure and incremental: text comes as it is decoded, pieces leave as soon as they are certain, half a marker never does.
How the text was cut makes no difference to what the pieces say.
"""
