// JavaScript clients against a running server, in their default forms: Vercel's `ai`, LangChain,
// OpenAI's and Ollama's own.
//
//     python -m benchmarks.clients.all_clients --only javascript
//
// installs them, starts a server and runs this. Its arguments are the server's URL and the model's
// name. The embedded model answers nonsense in the right form, so a case holds where the client
// throws nothing and finds the form that it asked for.

import assert from 'node:assert';
import { readFileSync } from 'node:fs';

const [url, model = 'embedded'] = process.argv.slice(2);
const baseURL = `${url}/v1`;
const apiKey = 'none';
const PROMPT = 'Which unit has the temperature of the sea?';
let numFailed = 0;

/** The versions of packages, as text; undefined where one is not installed. */
function versions(names) {
  try {
    // Some packages don't let `require` read their package.json.
    const read = (name) => readFileSync(new URL(`node_modules/${name}/package.json`, import.meta.url));
    return names.map((name) => `${name} ${JSON.parse(read(name)).version}`).join(', ');
  } catch {
    return undefined;
  }
}

/** Run a case and print its row. `packages`: what it needs. */
async function check(packages, what, run) {
  const found = versions(packages);
  let result = 'works';
  if (found === undefined) {
    result = 'skipped: not installed';
  } else {
    try {
      await run();
    } catch (error) {
      numFailed += 1;
      const body = error.responseBody ?? error.cause?.responseBody ?? '';
      result = `${error.name}: ${error.message} ${body}`.replaceAll('\n', ' ').slice(0, 300);
    }
  }
  console.log(`| ${found ?? packages.join(', ')} | ${what} | ${result} |`);
}

/** The module, and a schema and a tool's parts that both clients take. */
async function withSchema(name) {
  const { z } = await import('zod');
  const schema = z.object({
    unit: z.enum(['C', 'F']),
    degrees: z.number().int().min(0).max(9),
  });
  return { ...(await import(name)), schema };
}

// ---- Vercel's ai -------------------------------------------------------------------------------

const AI = { prompt: PROMPT, maxRetries: 0 };

/** Text, whole and streamed, with counts of tokens. */
async function aiTexts(served, { counts }) {
  const { generateText, streamText } = await import('ai');
  const asked = { ...AI, model: served, system: 'Be brief.', temperature: 0, maxOutputTokens: 8 };
  const whole = await generateText(asked);
  assert(whole.text && whole.finishReason === 'length' && whole.usage.outputTokens === 8);
  let failure;
  const stream = streamText({ ...asked, onError: ({ error }) => (failure = error) });
  let text = '';
  for await (const piece of stream.textStream) text += piece;
  if (failure) throw failure;
  assert.equal(text, whole.text);
  if (counts) assert.equal((await stream.usage).outputTokens, 8);
}

/** A call, whole and streamed, and what the model says to its result. */
async function aiTools(served) {
  const { generateText, streamText, stepCountIs, tool, schema } = await withSchema('ai');
  const report = tool({ description: 'Report.', inputSchema: schema, execute: () => 'noted' });
  const first = { toolChoice: { type: 'tool', toolName: 'report' } };
  const asked = {
    ...AI,
    model: served,
    tools: { report },
    maxOutputTokens: 60,
    stopWhen: stepCountIs(2),
    prepareStep: ({ stepNumber }) => (stepNumber === 0 ? first : { toolChoice: 'none' }),
  };
  const { steps } = await generateText(asked);
  assert.equal(steps.length, 2);
  schema.parse(steps[0].toolCalls[0].input);
  let failure;
  const stream = streamText({ ...asked, onError: ({ error }) => (failure = error) });
  const kinds = new Set();
  for await (const part of stream.fullStream) kinds.add(part.type);
  if (failure) throw failure;
  assert(kinds.has('tool-result') && kinds.has('text-delta'));
}

/** Objects of a schema, whole and streamed. */
async function aiObjects(served) {
  const { generateObject, generateText, streamObject, Output, schema } = await withSchema('ai');
  const asked = { ...AI, model: served };
  schema.parse((await generateObject({ ...asked, schema })).object);
  const choice = { ...asked, output: 'enum', enum: ['C', 'F'] };
  assert(['C', 'F'].includes((await generateObject(choice)).object));
  schema.parse((await generateText({ ...asked, output: Output.object({ schema }) })).output);
  let failure;
  const stream = streamObject({ ...asked, schema, onError: ({ error }) => (failure = error) });
  for await (const part of stream.partialObjectStream) assert(part);
  if (failure) throw failure;
  schema.parse(await stream.object);
}

async function aiEmbeddings(embedding) {
  const { embed, embedMany } = await import('ai');
  assert((await embed({ model: embedding, value: 'a', maxRetries: 0 })).embedding.length > 8);
  const many = await embedMany({ model: embedding, values: ['a', 'b'], maxRetries: 0 });
  assert.equal(many.embeddings.length, 2);
}

async function vercel() {
  const compatible = async (options = {}) => {
    const { createOpenAICompatible } = await import('@ai-sdk/openai-compatible');
    return createOpenAICompatible({ name: 'quire', baseURL, apiKey, ...options });
  };
  const openai = async () => (await import('@ai-sdk/openai')).createOpenAI({ baseURL, apiKey });
  let needed = ['ai', 'zod', '@ai-sdk/openai-compatible'];
  await check(needed, 'the default: text, tools', async () => {
    const provider = await compatible();
    await aiTexts(provider(model), { counts: false }); // it asks for counts of streams only if told
    await aiTools(provider(model));
  });
  await check(needed, 'embeddings', async () => {
    await aiEmbeddings((await compatible()).embeddingModel(model));
  });
  await check(needed, 'supportsStructuredOutputs, includeUsage', async () => {
    const served = (await compatible({ supportsStructuredOutputs: true, includeUsage: true }))(model);
    await aiTexts(served, { counts: true });
    await aiObjects(served);
  });
  await check(needed, 'completions', async () => {
    const { generateText } = await import('ai');
    const served = (await compatible()).completionModel(model);
    assert((await generateText({ ...AI, model: served, maxOutputTokens: 8 })).text);
  });
  needed = ['ai', 'zod', '@ai-sdk/openai'];
  await check(needed, 'the default (Responses): text, tools, objects', async () => {
    const served = (await openai())(model);
    await aiTexts(served, { counts: true });
    await aiTools(served);
    await aiObjects(served);
  });
  await check(needed, 'chat: text, tools, objects; embeddings', async () => {
    const provider = await openai();
    const served = provider.chat(model);
    await aiTexts(served, { counts: true });
    await aiTools(served);
    await aiObjects(served);
    await aiEmbeddings(provider.embedding(model));
  });
}

// ---- LangChain ---------------------------------------------------------------------------------

const LANGCHAIN = { model, apiKey, maxRetries: 0, configuration: { baseURL } };

/** Messages, whole, streamed and several at once. */
async function chainTexts(make) {
  const { HumanMessage, SystemMessage } = await import('@langchain/core/messages');
  const asked = [new SystemMessage('Be brief.'), new HumanMessage(PROMPT)];
  const chat = await make({ maxTokens: 8, temperature: 0 });
  const whole = await chat.invoke(asked);
  assert(whole.text && whole.usage_metadata.output_tokens === 8);
  let joined;
  for await (const piece of await chat.stream(asked)) joined = joined ? joined.concat(piece) : piece;
  assert.equal(joined.text, whole.text);
  assert.equal(joined.usage_metadata.output_tokens, 8);
  assert.equal((await chat.batch([PROMPT, PROMPT])).length, 2);
}

/** A call, whole and streamed, and its result in the next turn; a form by each method. */
async function chainTools(make) {
  const { HumanMessage } = await import('@langchain/core/messages');
  const { tool, schema } = await withSchema('@langchain/core/tools');
  const report = tool(() => 'noted', { name: 'report', description: 'Report.', schema });
  const chat = await make({ maxTokens: 60 });
  const forced = chat.bindTools([report], { tool_choice: 'report' });
  let streamed;
  for await (const piece of await forced.stream(PROMPT)) {
    streamed = streamed ? streamed.concat(piece) : piece;
  }
  for (const message of [await forced.invoke(PROMPT), streamed]) {
    schema.parse(message.tool_calls[0].args);
    const result = await report.invoke(message.tool_calls[0]);
    const history = [new HumanMessage(PROMPT), message, result];
    assert(await chat.bindTools([report]).invoke(history));
  }
  for (const method of [undefined, 'jsonSchema', 'functionCalling']) {
    const former = (await make({})).withStructuredOutput(schema, method && { method });
    schema.parse(await former.invoke(PROMPT));
  }
}

async function langchain() {
  const make = (more) => async (options) => {
    const { ChatOpenAI } = await import('@langchain/openai');
    return new ChatOpenAI({ ...LANGCHAIN, ...more, ...options });
  };
  const needed = ['@langchain/openai', '@langchain/core', 'zod'];
  await check(needed, 'ChatOpenAI: messages', () => chainTexts(make({})));
  await check(needed, 'ChatOpenAI: tools, withStructuredOutput', () => chainTools(make({})));
  const responses = make({ useResponsesApi: true });
  await check(needed, 'useResponsesApi: messages', () => chainTexts(responses));
  await check(needed, 'useResponsesApi: tools, withStructuredOutput', () => chainTools(responses));
  await check(needed, 'OpenAIEmbeddings; OpenAI', async () => {
    const { OpenAI, OpenAIEmbeddings } = await import('@langchain/openai');
    const vectors = await new OpenAIEmbeddings(LANGCHAIN).embedDocuments(['a', 'b']);
    assert(vectors.length === 2 && vectors[0].length > 8);
    assert(await new OpenAI({ ...LANGCHAIN, maxTokens: 8 }).invoke('import'));
  });
}

// ---- OpenAI's and Ollama's own ------------------------------------------------------------------

async function openai() {
  const make = async () => new (await import('openai')).default({ baseURL, apiKey, maxRetries: 0 });
  const messages = [{ role: 'user', content: PROMPT }];
  const asked = { model, messages, max_tokens: 8, temperature: 0 };
  await check(['openai'], 'chat, whole and streamed; models', async () => {
    const client = await make();
    const whole = await client.chat.completions.create(asked);
    let joined = '';
    for await (const chunk of await client.chat.completions.create({ ...asked, stream: true })) {
      joined += chunk.choices[0]?.delta?.content ?? '';
    }
    assert.equal(joined, whole.choices[0].message.content);
    assert.equal(whole.usage.completion_tokens, 8);
    assert((await client.models.list()).data.some((each) => each.id === model));
  });
  await check(['openai'], 'responses, streamed; embeddings', async () => {
    const client = await make();
    const stream = client.responses.stream({ model, input: PROMPT, max_output_tokens: 8 });
    assert.equal((await stream.finalResponse()).usage.output_tokens, 8);
    assert((await client.embeddings.create({ model, input: 'a' })).data[0].embedding.length > 8);
  });
  await check(['openai'], 'files and batches', async () => {
    const client = await make();
    const body = { messages, max_tokens: 4 };
    const call = { custom_id: 'a', method: 'POST', url: '/v1/chat/completions', body };
    const upload = new File([`${JSON.stringify(call)}\n`], 'calls.jsonl');
    const file = await client.files.create({ file: upload, purpose: 'batch' });
    let batch = await client.batches.create({
      input_file_id: file.id,
      endpoint: '/v1/chat/completions',
      completion_window: '24h',
    });
    while (!['completed', 'failed', 'expired'].includes(batch.status)) {
      await new Promise((resolve) => setTimeout(resolve, 50));
      batch = await client.batches.retrieve(batch.id);
    }
    const answers = await (await client.files.content(batch.output_file_id)).text();
    assert.equal(JSON.parse(answers).response.status_code, 200);
    assert((await client.files.delete(file.id)).deleted);
  });
}

async function ollama() {
  await check(['ollama'], 'chat, generate, embed, list, show, ps, pull', async () => {
    const { Ollama } = await import('ollama');
    const client = new Ollama({ host: url });
    const messages = [{ role: 'user', content: PROMPT }];
    const options = { num_predict: 8, temperature: 0 };
    const whole = await client.chat({ model, messages, options });
    let joined = '';
    for await (const part of await client.chat({ model, messages, options, stream: true })) {
      joined += part.message.content;
    }
    assert.equal(joined, whole.message.content);
    assert((await client.generate({ model, prompt: 'import', raw: true, options })).response);
    assert.equal((await client.embed({ model, input: ['a', 'b'] })).embeddings.length, 2);
    assert((await client.list()).models.length && (await client.ps()).models.length);
    assert((await client.show({ model })).capabilities.includes('completion'));
    assert.equal((await client.pull({ model })).status, 'success');
    const form = { type: 'object', properties: { a: { enum: [1] } }, required: ['a'] };
    const formed = await client.chat({ model, messages, format: form });
    assert.equal(JSON.parse(formed.message.content).a, 1);
  });
}

globalThis.AI_SDK_LOG_WARNINGS = false;
await vercel();
await langchain();
await openai();
await ollama();
process.exit(numFailed ? 1 : 0);
