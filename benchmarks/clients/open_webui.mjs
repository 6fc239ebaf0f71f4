// Drives Open WebUI in a Chromium: the list of models, a chat, stop and regenerate.
//
// Called by `open_webui.py` with the path of playwright-core, the page's address, the protocol's
// name, the browser, and a folder for pictures. Prints a row for each case.

import assert from 'node:assert';

const [playwright, url, protocol, executablePath, shots] = process.argv.slice(2);
const { chromium } = (await import(playwright)).default;
const LIMIT_MS = 30_000;
let numFailed = 0;

const browser = await chromium.launch({ executablePath, args: ['--no-sandbox'] });
const page = await browser.newPage({ viewport: { width: 1280, height: 900 } });
page.setDefaultTimeout(LIMIT_MS);

async function check(what, run) {
  let result = 'works';
  try {
    await run();
  } catch (error) {
    numFailed += 1;
    result = `${error.name}: ${error.message}`.replaceAll('\n', ' ').slice(0, 300);
  }
  await page.screenshot({ path: `${shots}/${protocol}_${what.replaceAll(/\W+/g, '_')}.png` });
  console.log(`| Open WebUI, ${protocol} | ${what} | ${result} |`);
}

/** Send a message, as a person does. */
async function send(text) {
  const input = page.locator('#chat-input');
  await input.click();
  await input.pressSequentially(text);
  await page.keyboard.press('Enter');
}

/** The text of the last answer. */
async function lastAnswer() {
  return (await page.locator('.chat-assistant').last().innerText()).trim();
}

/** Wait until the page has no stop button any more. */
async function waitDone() {
  await page.locator('button[aria-label="Stop"], #stop-response-button').waitFor({ state: 'detached' });
}

await check('models', async () => {
  await page.goto(url);
  // The first visit shows what is new.
  await page.getByRole('button', { name: /okay, let's go/i }).click();
  await page.locator('#chat-input').waitFor();
  const { token } = await (await page.request.post(`${url}/api/v1/auths/signin`, {
    data: { email: '', password: '' },
  })).json();
  const listed = await (await page.request.get(`${url}/api/models`, {
    headers: { Authorization: `Bearer ${token}` },
  })).json();
  assert(listed.data.some((each) => each.id.startsWith('embedded')), 'embedded is listed');
  await page.getByText(/embedded/).first().waitFor();
});

await check('chat', async () => {
  await send('What does os.path.join do?');
  await page.locator('.chat-assistant').first().waitFor();
  await page.waitForFunction(() => {
    const all = document.querySelectorAll('.chat-assistant');
    return all.length && all[all.length - 1].innerText.trim().length > 20;
  });
});

await check('stop', async () => {
  const button = page.locator('button[aria-label="Stop"], #stop-response-button').first();
  await button.click();
  await waitDone();
  assert((await lastAnswer()).length > 0);
});

await check('regenerate', async () => {
  const before = await page.locator('.chat-assistant').count();
  await page.locator('.chat-assistant').last().hover();
  await page.locator('.regenerate-response-button, button[aria-label="Regenerate"]').last().click();
  const again = page.getByText('Try Again', { exact: true });
  if (await again.isVisible()) await again.click();
  await page.waitForFunction(() => {
    const all = document.querySelectorAll('.chat-assistant');
    return all.length && all[all.length - 1].innerText.trim().length > 20;
  });
  assert.equal(await page.locator('.chat-assistant').count(), before);
  const button = page.locator('button[aria-label="Stop"], #stop-response-button').first();
  if (await button.isVisible()) await button.click();
});

await browser.close();
process.exit(numFailed ? 1 : 0);
