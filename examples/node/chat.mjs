// The gRPC service from Node: `npm install && node chat.mjs [HOST:PORT]`.
// Streams an answer, hangs up in the middle, goes on from the next token, and ends another answer by a deadline.
import { randomUUID } from "node:crypto";
import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";

const HANG_UP_AFTER = 10;
const source = fileURLToPath(new URL("../../src", import.meta.url));
const definition = loader.loadSync("kvferry/proto/v1/chat.proto", {
  includeDirs: [source], keepCase: true, longs: Number, enums: String, defaults: true, oneofs: true,
});
const { kvferry } = grpc.loadPackageDefinition(definition);
const chat = new kvferry.v1.ChatService(process.argv[2] ?? "127.0.0.1:7070", grpc.credentials.createInsecure());

const within = (seconds) => ({ deadline: Date.now() + 1000 * seconds });

const createSession = () =>
  new Promise((resolve, reject) =>
    chat.CreateSession({}, within(10), (error, reply) => (error ? reject(error) : resolve(reply.session.session_id))),
  );

// The turn's name is ours: asking again with the same one never starts a second turn.
const aTurn = (session_id, content, max_tokens) => ({
  session_id, turn_id: randomUUID(), messages: [{ role: "user", content }], max_tokens,
});

// Prints the tokens from index `expected` on. How many the answer has now, and its end if that came.
async function read(stream, expected, stopAt = Infinity) {
  let finished = null;
  for await (const { event } of stream) {
    if (event.event === "finished") finished = event.finished;
    if (event.event !== "token") continue;
    if (event.sequence !== expected) throw new Error(`token ${event.sequence} came instead of ${expected}`);
    process.stdout.write(event.token.text);
    expected += 1;
    if (expected === stopAt) break;
  }
  return { seen: expected, finished };
}

// A lost connection loses nothing: the turn goes on without a reader, and Resume streams it from any token on.
async function reconnect(session_id) {
  const turn = aTurn(session_id, "Tell me a long story about a ferry.", 40);
  const stream = chat.Generate(turn);
  stream.on("error", () => {}); // what the cancelled call says afterwards
  const { seen } = await read(stream, 0, HANG_UP_AFTER);
  stream.cancel();
  console.log(`\n[hung up after ${seen} tokens]`);
  const rest = await read(chat.Resume({ session_id, turn_id: turn.turn_id, from_index: seen }, within(60)), seen);
  console.log(`\n[${rest.seen} tokens, each of them once]`);
}

// The deadline of the call ends the answer with the tokens that it has; the session keeps them.
async function deadline(session_id) {
  const turn = aTurn(session_id, "Now a very long one about the sea.", 400);
  try {
    await read(chat.Generate(turn, within(1)), 0);
  } catch (error) {
    if (error.code !== grpc.status.DEADLINE_EXCEEDED) throw error;
  }
  const { finished } = await read(chat.Resume({ session_id, turn_id: turn.turn_id }, within(60)), 0);
  console.log(`\n[the second answer ended with ${finished.reason} after ${finished.n_answer_tokens} tokens]`);
}

const session = await createSession();
await reconnect(session);
await deadline(session);
chat.close();
