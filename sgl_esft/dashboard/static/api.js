// Requests to the server, with the key that the user typed in.

const STORE = "sgl_esft_key"; // of this tab's session; gone when the tab is
const TIMEOUT_MS = 10000;

// What the server said, or that it said nothing (status 0): in time (isLate), or at all.
export class ApiError extends Error {
  constructor(status, type, message, retryAfterMs = 0, isLate = false) {
    super(message);
    this.status = status;
    this.type = type;
    this.retryAfterMs = retryAfterMs;
    this.isLate = isLate;
  }
}

export function key() {
  return sessionStorage.getItem(STORE) ?? "";
}

// Returns what is wrong with the key, or "".
export function setKey(value) {
  const wanted = value.trim();
  if (!/^[\x21-\x7e]*$/.test(wanted)) return "A key is printable ASCII without spaces.";
  if (wanted) sessionStorage.setItem(STORE, wanted);
  else sessionStorage.removeItem(STORE);
  return "";
}

function errorOf(response, body) {
  const retryAfterMs = 1000 * (Number.parseFloat(response.headers.get("retry-after")) || 0);
  let type = "";
  let message = "";
  try {
    const said = JSON.parse(body);
    const error = said.error ?? said;
    type = typeof error.type === "string" ? error.type : "";
    message = [error.message, error.detail, error].find((each) => typeof each === "string") ?? "";
  } catch {
    message = response.headers.get("content-type")?.startsWith("text/plain") ? body.slice(0, 500) : "";
  }
  return new ApiError(response.status, type, message || `the server answered ${response.status}`, retryAfterMs);
}

async function send(method, path, body) {
  const headers = {};
  if (key()) headers.Authorization = `Bearer ${key()}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  try {
    const response = await fetch(path, {
      method,
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      cache: "no-store",
      credentials: "omit",
      redirect: "error",
      signal: AbortSignal.timeout(TIMEOUT_MS),
    });
    return [response, await response.text()];
  } catch (error) {
    const isLate = error.name === "TimeoutError";
    const words = isLate ? `no answer within ${TIMEOUT_MS / 1000} s` : "the server does not answer";
    throw new ApiError(0, "", words, 0, isLate);
  }
}

// Text of the answer. Throws ApiError.
export async function requestText(method, path, body) {
  const [response, answer] = await send(method, path, body);
  if (!response.ok) throw errorOf(response, answer);
  return answer;
}

// JSON of the answer, null where it has no body. Throws ApiError.
export async function request(method, path, body) {
  const answer = await requestText(method, path, body);
  if (!answer) return null;
  try {
    return JSON.parse(answer);
  } catch {
    throw new ApiError(200, "", `${path}: the answer is not JSON`);
  }
}

// Like request GET, but a 503 with a body that says why is an answer too.
export async function requestState(path) {
  const [response, answer] = await send("GET", path);
  if (!response.ok && response.status !== 503) throw errorOf(response, answer);
  try {
    return JSON.parse(answer);
  } catch {
    return { ready: response.ok };
  }
}

const segment = (name) => encodeURIComponent(name);
export const adapterPath = (name) => `/v1/adapters/${segment(name)}`;
