// Colours of owners, apart for readers with any colour vision: Okabe and Ito's palette, in three
// lightnesses. Slots are the engine's numbers of live requests.

const BASES = [
  [0, 114, 178], [230, 159, 0], [0, 158, 115], [213, 94, 0],
  [86, 180, 233], [204, 121, 167], [240, 228, 66], [148, 103, 189],
];
const STEPS = [0, 0.28, -0.28];

const known = new Map();

/** The [red, green, blue] of a slot. */
export function ownerColor(slot) {
  if (!known.has(slot)) {
    const base = BASES[(slot - 1) % BASES.length];
    const shift = STEPS[Math.floor((slot - 1) / BASES.length) % STEPS.length];
    known.set(slot, base.map((part) =>
      Math.round(shift < 0 ? part * (1 + shift) : part + (255 - part) * shift)));
  }
  return known.get(slot);
}

/** A colour mixed into a background, as CSS: 0 is the background. */
export function mixed(rgb, background, share) {
  const parts = rgb.map((part, at) => Math.round(background[at] + (part - background[at]) * share));
  return `rgb(${parts.join(",")})`;
}

/** The [red, green, blue] of a CSS colour that is written as #rrggbb. */
export function parts(hex) {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}
