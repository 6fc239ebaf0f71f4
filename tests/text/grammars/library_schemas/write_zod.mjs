// Writes zod.json: the JSON schema of each kind of zod 4, with values that zod accepts and refuses.
//
//     npm install zod@4 && node write_zod.mjs > zod.json
//
// Each kind: a schema of zod, values that it accepts, values that it refuses.

import * as z from "zod";

const Chain = z.object({ value: z.int(), get next() { return Chain.nullable(); } });
const Tree = z.object({ name: z.string(), get children() { return z.array(Tree); } });
const cat = z.object({ kind: z.literal("cat"), lives: z.int() });
const dog = z.object({ kind: z.literal("dog"), name: z.string() });
const uuid = (version) => `a1b2c3d4-0000-${version}000-8000-0123456789ab`;
const max32 = 2 ** 31;

const kinds = {
  // Texts.
  string: [z.string(), ["", "ü"], [1, null]],
  length: [z.string().length(3), ["abc"], ["ab", "abcd"]],
  min_max: [z.string().min(2).max(3), ["ab", "abc"], ["a", "abcd"]],
  regex: [z.string().regex(/^[a-z]+\d$/), ["a1", "xyz9"], ["a", "A1", "a1 "]],
  starts_with: [z.string().startsWith("a.b"), ["a.b", "a.bc"], ["a-b", "xa.b"]],
  ends_with: [z.string().endsWith(".z"), [".z", "a.z"], ["az", ".zz"]],
  includes: [z.string().includes("(x)"), ["(x)", "a(x)b"], ["x", "(x"]],
  starts_and_ends: [z.string().startsWith("a").endsWith("z").max(3), ["az", "abz"], ["a", "z", "abcz"]],
  lowercase: [z.string().lowercase(), ["abc1", ""], ["Abc"]],
  uppercase: [z.string().uppercase(), ["ABC1", ""], ["aBC"]],
  trim: [z.string().trim().toLowerCase(), ["a"], [1]],
  password: [
    z.string().regex(/^(?=.*[a-z])(?=.*[A-Z])(?=.*\d)(?!.*\s)[A-Za-z\d@$!%*?& ]{8,}$/),
    ["Passw0rd", "aB3aB3aB3!"], ["password", "PASSW0RD", "Passwords", "Pa0", "Pass w0rd"],
  ],
  template_literal: [z.templateLiteral(["v", z.int(), ".", z.enum(["a", "b"])]), ["v1.a", "v-20.b"], ["v.a", "v1.c", "v1a"]],
  stringbool: [z.stringbool(), [], [], "input"],
  // Formats.
  email: [z.email(), ["a@b.co", "a.b+c@d-e.org"], ["a", ".a@b.co", "a..b@c.de", "a@b"]],
  html5_email: [z.email({ pattern: z.regexes.html5Email }), ["a@b.co"], ["a", "a@-b.c"]],
  rfc5322_email: [z.email({ pattern: z.regexes.rfc5322Email }), ["a@b.co"], ["a", "a@b"]],
  url: [z.url(), ["https://example.org/a?b=c#d", "mailto:a@b.co"], ["example", "//a/b"]],
  http_url: [z.httpUrl(), ["https://example.org"], ["example"]],
  uuid: [z.uuid(), [uuid(4), uuid(7)], [uuid(0), "a1b2c3d4"]],
  uuidv4: [z.uuidv4(), [uuid(4)], [uuid(7)]],
  uuidv6: [z.uuidv6(), [uuid(6)], [uuid(4)]],
  uuidv7: [z.uuidv7(), [uuid(7)], [uuid(4)]],
  guid: [z.guid(), [uuid(0)], ["a1b2"]],
  nanoid: [z.nanoid(), ["V1StGXR8_Z5jdHi6B-myT"], ["V1StGXR8", "V1StGXR8_Z5jdHi6B-my!"]],
  cuid: [z.cuid(), ["cjld2cjxh0000qzrmn831i7rn"], ["xjld2cjxh0000", "c1"]],
  cuid2: [z.cuid2(), ["tz4a98xxat96iws9zmbrgj3a"], ["A", "a-b", ""]],
  ulid: [z.ulid(), ["01ARZ3NDEKTSV4RRFFQ69G5FAV"], ["81ARZ3NDEKTSV4RRFFQ69G5FAV", "01ARZ3"]],
  xid: [z.xid(), ["9m4e2mr0ui3e8a215n4g"], ["9m4e2mr0ui3e8a215n4z", "9m4e"]],
  ksuid: [z.ksuid(), ["0ujtsYcgvSTl8PAuAdqWYSMnLOv"], ["0ujtsYcgvSTl8PAuAdqWYSMnLO-", "0uj"]],
  emoji: [z.emoji(), ["😀", "👍🎉"], ["a", "", "😀a"]],
  base64: [z.base64(), ["", "QUI=", "QUJD"], ["QUI", "Q!=="]],
  base64url: [z.base64url(), ["QUI", "Q-_D"], ["Q+/D", "Q"]],
  ipv4: [z.ipv4(), ["127.0.0.1", "255.255.255.255"], ["256.0.0.1", "1.2.3"]],
  ipv6: [z.ipv6(), ["::1", "2001:db8::8a2e:370:7334"], ["1.2.3.4", ":::"]],
  mac: [z.mac(), ["00:1A:2B:3C:4D:5E"], ["00-1A-2B-3C-4D-5E", "00:1A"]],
  cidrv4: [z.cidrv4(), ["10.0.0.0/8"], ["10.0.0.0", "10.0.0.0/33"]],
  cidrv6: [z.cidrv6(), ["2001:db8::/32"], ["2001:db8::", "2001:db8::/129"]],
  e164: [z.e164(), ["+14155552671"], ["14155552671", "+04155552671"]],
  jwt: [
    z.jwt(),
    ["eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl"],
    ["abc", "a.b.c", "eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9.eyJzdWIiOiIxIn0"],
  ],
  hostname: [z.hostname(), ["example.org", "a-b.c"], ["-a", "a..b", "a_b"]],
  hex: [z.hex(), ["", "0aF"], ["0x1", "g"]],
  sha256: [z.hash("sha256"), ["0".repeat(64)], ["0".repeat(63), "g".repeat(64)]],
  iso_date: [z.iso.date(), ["2024-02-29"], ["2023-02-29", "2024-1-1", "2024-13-01"]],
  iso_time: [z.iso.time(), ["03:15:00", "23:59:59.999"], ["24:00:00", "3:15", "03:15:00Z"]],
  iso_time_minute: [z.iso.time({ precision: -1 }), ["03:15"], ["03:15:00", "3:15"]],
  iso_datetime: [z.iso.datetime(), ["2024-01-01T00:00:00Z", "2024-01-01T00:00:00.5Z"], ["2024-01-01T00:00:00", "2024-01-01T00:00:00+01:00"]],
  iso_datetime_offset: [z.iso.datetime({ offset: true }), ["2024-01-01T00:00:00+01:00", "2024-01-01T00:00:00Z"], ["2024-01-01T00:00:00", "2024-02-30T00:00:00Z"]],
  iso_duration: [z.iso.duration(), ["P3Y6M4DT12H30M5S", "P1W", "PT1S"], ["P", "PT", "P1W1D", "1D"]],
  // Numbers.
  number: [z.number(), [0, -1.5, 1e5], ["1", null]],
  int: [z.int(), [0, -3], [1.5, "1"]],
  int32: [z.int32(), [max32 - 1, -max32], [max32, -max32 - 1, 1.5]],
  uint32: [z.uint32(), [0, 2 * max32 - 1], [-1, 2 * max32]],
  float32: [z.float32(), [0.5, -1000000], ["1"]],
  float64: [z.float64(), [0.5, -1000000], ["1"]],
  gt_lt: [z.number().gt(1).lt(5), [1.5, 4], [1, 5, 0]],
  gte_lte: [z.number().gte(-2.5).lte(9), [-2.5, 9], [-2.6, 9.1]],
  multiple_of: [z.number().multipleOf(0.5), [1, 1.5], [0.25]],
  positive: [z.number().positive(), [0.5], [0, -1]],
  nonnegative: [z.int().nonnegative(), [0, 7], [-1]],
  // Constants.
  boolean: [z.boolean(), [true, false], [0, "true"]],
  null: [z.null(), [null], [0, ""]],
  any: [z.any(), [1, "a", null], []],
  unknown: [z.unknown(), [1, { a: [] }], []],
  literal: [z.literal("a"), ["a"], ["b", 1]],
  literals: [z.literal(["a", 1, true, null]), ["a", 1, true, null], ["b", 2, false]],
  enum: [z.enum(["a", "b"]), ["a", "b"], ["c", ""]],
  native_enum: [z.enum({ Red: "red", Blue: "blue" }), ["red"], ["Red"]],
  numeric_enum: [z.enum({ One: 1, Two: 2 }), [1, 2], [3, "1"]],
  // Arrays.
  array: [z.array(z.string()).min(1).max(2), [["a"], ["a", "b"]], [[], ["a", "b", "c"], [1]]],
  nonempty: [z.array(z.int()).nonempty(), [[1]], [[]]],
  tuple: [z.tuple([z.string(), z.int()]), [["a", 1]], [["a"], ["a", 1, 2], [1, "a"]]],
  tuple_rest: [z.tuple([z.string()], z.boolean()), [["a"], ["a", true, false]], [[], ["a", 1]]],
  // Objects.
  object: [z.object({ a: z.string(), b: z.int().optional() }), [{ a: "x" }, { a: "x", b: 1 }], [{}, { a: 1 }]],
  strict_object: [z.strictObject({ a: z.string() }), [{ a: "x" }], [{ a: "x", b: 1 }, {}]],
  loose_object: [z.looseObject({ a: z.string() }), [{ a: "x" }, { a: "x", b: 1 }], [{ b: 1 }]],
  catchall: [z.object({ a: z.string() }).catchall(z.int()), [{ a: "x", b: 1 }], [{ a: "x", b: "y" }]],
  partial: [z.object({ a: z.string(), b: z.int() }).partial(), [{}, { b: 1 }], [{ b: "x" }]],
  record: [z.record(z.string(), z.int()), [{}, { a: 1 }], [{ a: "x" }]],
  record_enum: [z.record(z.enum(["a", "b"]), z.boolean()), [{ a: true, b: false }], [{ a: true }, { a: true, b: true, c: true }, { a: 1, b: 1 }]],
  record_union: [z.record(z.union([z.literal("a"), z.literal("b")]), z.int()), [{ a: 1, b: 2 }], [{ a: 1 }, { a: 1, b: 2, c: 3 }]],
  partial_record: [z.partialRecord(z.enum(["a", "b"]), z.boolean()), [{}, { b: true }], [{ c: true }]],
  loose_record: [z.looseRecord(z.string().regex(/^x_/), z.int()), [{ x_a: 1 }, { b: "c" }], [{ x_a: "b" }]],
  record_regex: [z.record(z.string().regex(/^k\d+$/), z.int()), [{}, { k1: 1, k22: 2 }], [{ a: 1 }, { k1: "x" }]],
  record_uuid: [z.record(z.uuid(), z.int()), [{ [uuid(4)]: 1 }], [{ a: 1 }, { [uuid(0)]: 1 }]],
  record_length: [z.record(z.string().min(2).max(3), z.int()), [{ ab: 1, abc: 2 }], [{ a: 1 }, { abcd: 1 }]],
  record_number: [z.record(z.number(), z.string()), [{ 1: "a", "-1.5": "b" }], [{ a: "b" }]],
  record_template: [z.record(z.templateLiteral(["id-", z.int()]), z.string()), [{ "id-1": "a" }], [{ id: "a" }]],
  never: [z.object({ a: z.string(), b: z.never().optional() }), [{ a: "x" }], [{ a: "x", b: 1 }]],
  // Kinds made of others.
  union: [z.union([z.string(), z.int()]), ["a", 1], [null, 1.5]],
  xor: [z.xor([z.string(), z.int()]), ["a", 1], [null]],
  discriminated_union: [z.discriminatedUnion("kind", [cat, dog]), [{ kind: "cat", lives: 9 }, { kind: "dog", name: "x" }], [{ kind: "cat", name: "x" }, { kind: "cow" }, {}]],
  intersection: [z.looseObject({ a: z.string() }).and(z.looseObject({ b: z.int() })), [{ a: "x", b: 1 }], [{ a: "x" }, { b: 1 }]],
  nullable: [z.string().nullable(), [null, "a"], [1]],
  nullish: [z.object({ a: z.int().nullish() }), [{}, { a: null }, { a: 1 }], [{ a: "x" }]],
  optional: [z.string().optional(), ["a"], [1]],
  default: [z.object({ a: z.string().default("x") }), [{ a: "y" }], [{ a: 1 }]],
  default_of_input: [z.object({ a: z.string().default("x") }), [{}, { a: "y" }], [{ a: 1 }], "input"],
  prefault: [z.object({ a: z.string().prefault("x") }), [{ a: "y" }], [{ a: 1 }]],
  catch: [z.string().catch("x"), ["a"], []],
  readonly: [z.array(z.int()).readonly(), [[], [1]], [["a"]]],
  lazy: [z.lazy(() => z.string()), ["a"], [1]],
  recursive: [Chain, [{ value: 1, next: null }, { value: 1, next: { value: 2, next: null } }], [{ value: 1 }, { value: 1, next: {} }]],
  recursive_array: [Tree, [{ name: "a", children: [{ name: "b", children: [] }] }], [{ name: "a" }, { name: "a", children: [{}] }]],
  brand: [z.string().brand("x"), ["a"], [1]],
  pipe: [z.string().pipe(z.string().min(2)), ["ab"], ["a"]],
  transform: [z.string().transform((text) => text.length), ["a"], [1], "input"],
  promise: [z.promise(z.string()), [], []],
  json: [z.json(), [null, { a: [1, "b"] }], []],
  file: [z.file().min(1).max(99).mime("image/png"), [], []],
  meta: [z.string().meta({ id: "m", title: "t", description: "d", examples: ["e"], deprecated: true, unit: "kg" }), ["a"], [1]],
};

const found = {};
for (const [name, [kind, good, bad, io = "output"]] of Object.entries(kinds)) {
  for (const [values, expected] of [[good, true], [bad, false]]) {
    for (const value of values) {
      if (kind.safeParse(value).success !== expected) throw new Error(`${name}: ${JSON.stringify(value)}`);
    }
  }
  found[name] = { schema: z.toJSONSchema(kind, { io }), good, bad };
}
const lines = Object.entries(found).map(([name, each]) => `${JSON.stringify(name)}: ${JSON.stringify(each)}`);
console.log(`{\n${lines.join(",\n")}\n}`);
