// Names of requests for people.

/** A request's id without the part that only makes it unique. */
export function short(id) {
  const parts = /^([a-z]+)-([0-9a-f]{32})(.*)$/.exec(id);
  return parts ? `${parts[1]} ${parts[2].slice(0, 6)}${parts[3]}` : id.slice(0, 22);
}
