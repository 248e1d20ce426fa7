"""Other APIs than chat completions, as translations: a request becomes an OpenAI chat body, the answer's pieces become
that API's objects and events. What they ask of a model is one and the same thing inside."""
