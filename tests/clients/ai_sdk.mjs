// What tests/clients/test_ai_sdk.py asks for, by the Vercel AI SDK. Prints one line of JSON for each feature.
import { createRequire } from 'node:module';

const require = createRequire(process.env.AREAL_NPM_CLIENTS + '/');
const { createOpenAICompatible } = require('@ai-sdk/openai-compatible');
const { generateText, streamText, tool, Output } = require('ai');
const { z } = require('zod');

const provider = createOpenAICompatible({
  name: 'areal',
  baseURL: process.env.AREAL_URL,
  apiKey: process.env.AREAL_KEY,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const asked = { model: provider(process.env.AREAL_MODEL), prompt: 'Hello there, friend!', maxRetries: 0 };
const show = (feature, found) => console.log(JSON.stringify({ feature, found }));

const chat = await generateText({ ...asked, maxOutputTokens: 24 });
show('chat', chat.text);
show('usage', chat.usage.outputTokens);

const stream = streamText({ ...asked, maxOutputTokens: 24 });
let parts = 0;
for await (const part of stream.textStream) parts += part.length > 0;
show('streaming', parts);

const set_light = tool({ description: 'Switch the light.', inputSchema: z.object({ state: z.enum(['on', 'off']) }) });
const called = await generateText({ ...asked, tools: { set_light }, toolChoice: 'required', maxOutputTokens: 200 });
show('tools', called.toolCalls.map(call => call.input.state));

const schema = z.object({ mood: z.enum(['good', 'bad']) });
const held = await generateText({ ...asked, output: Output.object({ schema }), maxOutputTokens: 300 });
show('structured output', held.output.mood);

const refused = await generateText({ ...asked, model: provider('absent') }).catch(error => error.statusCode);
show('errors', refused);
