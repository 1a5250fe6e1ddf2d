// What two Node clients are asked to do; as python_checks.py: `node node_checks.mjs CLIENT URL MODEL` in the folder of
// their packages prints a JSON line for each check.
import assert from 'node:assert'
import { createRequire } from 'node:module'
import { pathToFileURL } from 'node:url'

const [client, url, model] = process.argv.slice(2)
const here = createRequire(process.cwd() + '/')
const load = (name) => import(pathToFileURL(here.resolve(name)))
const ask = 'What is the capital of France?'
const forecast = 'What is the weather in Oslo?'
const messages = [{ role: 'user', content: ask }]
const parameters = {
  type: 'object', properties: { city: { type: 'string' } }, required: ['city'], additionalProperties: false,
}

async function openai() {
  const OpenAI = (await load('openai')).default
  const { zodResponseFormat, zodTextFormat } = await load('openai/helpers/zod')
  const { z } = await load('zod')
  const api = new OpenAI({ baseURL: `${url}/v1`, apiKey: 'none', maxRetries: 0 })
  const City = z.object({ name: z.string() })
  return {
    'chat and stream': async () => {
      const whole = await api.chat.completions.create({ model, messages, temperature: 0 })
      const stream = api.chat.completions.stream({ model, messages, temperature: 0 })
      assert.equal((await stream.finalChatCompletion()).choices[0].message.content, whole.choices[0].message.content)
    },
    parse: async () => {
      const answer = await api.chat.completions.parse({
        model, messages, response_format: zodResponseFormat(City, 'city'),
      })
      assert.ok(answer.choices[0].message.parsed.name !== undefined)
    },
    runTools: async () => {
      const runner = api.chat.completions.runTools({
        model,
        messages: [{ role: 'user', content: forecast }],
        temperature: 0,
        tool_choice: { type: 'function', function: { name: 'weather' } },
        tools: [{
          type: 'function',
          function: { name: 'weather', parameters, parse: JSON.parse, function: ({ city }) => `sunny in ${city}` },
        }],
      })
      assert.ok(await runner.finalFunctionToolCall())
    },
    responses: async () => {
      const answer = await api.responses.parse({ model, input: ask, text: { format: zodTextFormat(City, 'city') } })
      assert.ok(answer.output_parsed)
      const kinds = []
      for await (const event of await api.responses.create({ model, input: ask, stream: true })) kinds.push(event.type)
      assert.equal(kinds.at(-1), 'response.completed')
    },
    completions: async () => {
      assert.ok((await api.completions.create({ model, prompt: 'The sky is', max_tokens: 8 })).choices[0].text)
    },
  }
}

async function ai() {
  const { generateText, streamText, generateObject, Output, tool, jsonSchema, stepCountIs } = await load('ai')
  const { createOpenAICompatible } = await load('@ai-sdk/openai-compatible')
  const provider = createOpenAICompatible({
    name: 'here', baseURL: `${url}/v1`, apiKey: 'none', supportsStructuredOutputs: true, includeUsage: true,
  })
  const common = { model: provider(model), temperature: 0, maxRetries: 0 }
  const city = jsonSchema({ ...parameters })
  return {
    'generateText and streamText': async () => {
      const { text } = await generateText({ ...common, prompt: ask })
      const stream = streamText({ ...common, prompt: ask })
      let streamed = ''
      for await (const part of stream.textStream) streamed += part
      assert.equal(streamed, text)
      assert.ok((await stream.usage).outputTokens > 0)
    },
    generateObject: async () => {
      assert.ok((await generateObject({ ...common, prompt: ask, schema: city })).object.city !== undefined)
    },
    'Output.object': async () => {
      const { output } = await generateText({ ...common, prompt: ask, output: Output.object({ schema: city }) })
      assert.ok(output.city !== undefined)
    },
    tools: async () => {
      const { steps } = await generateText({
        ...common,
        prompt: forecast,
        toolChoice: 'required',
        stopWhen: stepCountIs(2),
        maxOutputTokens: 200,
        tools: { weather: tool({ inputSchema: city, execute: ({ city }) => `sunny in ${city}` }) },
      })
      assert.equal(steps[0].toolResults[0].toolName, 'weather')
      const streamed = streamText({
        ...common, prompt: forecast, toolChoice: 'required', tools: { weather: tool({ inputSchema: city }) },
      })
      assert.ok((await streamed.toolCalls)[0].input.city !== undefined)
    },
    'completion model': async () => {
      const { text } = await generateText({ ...common, model: provider.completionModel(model), prompt: ask, maxOutputTokens: 8 })
      assert.ok(text)
    },
  }
}

for (const [check, run] of Object.entries(await (client === 'openai-npm' ? openai() : ai()))) {
  let error = ''
  try {
    await run()
  } catch (raised) {
    error = `${raised}`.slice(0, 600)
  }
  console.log(JSON.stringify({ check, error }))
}
