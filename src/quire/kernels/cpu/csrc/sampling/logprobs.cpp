// Log-probabilities and ranks of tokens, and the k best tokens.
//
// The distribution is the line's own. Two passes over a line: the largest and best logits; then the
// sum of e^(logit - largest), in fp32 over blocks of 1024 tokens and in fp64 over the blocks, in
// one order however threads divide the line.
#include <cmath>

#include "sampling/scan_logits.h"

namespace quire::QUIRE_ISA {
namespace {

struct alignas(64) SummedPart {
  double sum;
  int64_t num_above;
};

inline double sum_block(const float* line, float largest, int64_t first, int64_t end) {
  vf sums[4] = {};
  int64_t t = first;
  for (; t + 4 * kLanes <= end; t += 4 * kLanes)
    for (int part = 0; part < 4; ++part)
      sums[part] += exp(load(line + t + part * kLanes) - splat(largest));
  for (; t < end; t += kLanes)
    sums[0] += exp(load_logits(line + t, end - t) - splat(largest));
  return double(reduce_add((sums[0] + sums[1]) + (sums[2] + sums[3])));
}

// One term of the line's sum: at most kRangeTokens tokens.
SummedPart sum_range(const float* line, float largest, float own, int64_t first, int64_t end) {
  constexpr int64_t kBlock = 64 * kLanes;
  double sum = 0;
  for (int64_t start = first; start < end; start += kBlock)
    sum += sum_block(line, largest, start, min_of(end, start + kBlock));
  int64_t num_above = 0;
  for (int64_t t = first; t < end; t += kPartLanes)
    num_above += __builtin_popcount(greater_lanes(load_part(line + t, end - t), part{} + own));
  return {sum, num_above};
}

SummedPart operator+(const SummedPart& a, const SummedPart& b) {
  return {a.sum + b.sum, a.num_above + b.num_above};
}

template <typename Division>
SummedPart sum_line(const Division& division, const LineMemory<Division>& memory,
                    const float* line, float largest, float own) {
  auto* parts = memory.template parts<SummedPart>();
  division.run([&](int64_t part, int64_t first, int64_t end) {
    SummedPart sum{};
    for (int64_t t = first; t < end; t += kRangeTokens)
      sum = sum + sum_range(line, largest, own, t, min_of(end, t + kRangeTokens));
    parts[part] = sum;
  });
  SummedPart all{};
  for (int64_t part = 0; part < division.num_parts(); ++part) all = all + parts[part];
  return all;
}

template <typename Division>
void describe_line(const Division& division, const LogprobRow& row, const float* line,
                   float* logprobs, int64_t* tokens) {
  const LineMemory<Division> memory(division, min_of(row.num_top, division.V));
  Scan found = scan(division, memory, line);
  const float own = line[row.token_id];
  const SummedPart sum = sum_line(division, memory, line, found.largest.value, own);
  const double normaliser = double(found.largest.value) + std::log(sum.sum);
  logprobs[0] = float(double(own) - normaliser);
  tokens[0] = sum.num_above + 1;
  if (!is_finite(found.largest.value)) {  // the caller finds this NaN, and uses torch
    logprobs[0] = __builtin_nanf("");
    return;
  }
  found.best.sort();
  for (int64_t i = 0; i < found.best.size(); ++i) {
    const uint64_t key = found.best[i];
    tokens[1 + i] = BestTokens::token(key);
    logprobs[1 + i] = float(double(BestTokens::logit(key)) - normaliser);
  }
}

}  // namespace

void token_logprobs(Pool& pool, const float* logits, int64_t ld, int64_t V, const LogprobRow* rows,
                    int64_t R, int64_t width, float* logprobs, int64_t* tokens) {
  for_lines(pool, R, V, [=](int64_t i, const auto& division) {
    describe_line(division, rows[i], logits + rows[i].line * ld, logprobs + i * width,
                  tokens + i * width);
  });
}

}  // namespace quire::QUIRE_ISA
