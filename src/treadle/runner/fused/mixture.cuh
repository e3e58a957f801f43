// What stands around the experts of a mixture: the choice of a token's experts, and the sum of what they give.

namespace treadle {

__device__ inline float wide(float v) { return v; }
__device__ inline float narrow(float v, float) { return v; }

enum Score { SOFTMAX, CHOSEN_SOFTMAX, SIGMOID };
enum Rounds { NOTHING, SCORES, KEYS };  // to the logits' type: nothing, the scores, or what experts are chosen by as well

__device__ inline float largest(float v) {
  for (int by = 16; by; by /= 2) v = fmaxf(v, __shfl_xor_sync(~0u, v, by));
  return v;
}

__device__ inline float total(float v) {
  for (int by = 16; by; by /= 2) v += __shfl_xor_sync(~0u, v, by);
  return v;
}

// The index of the lanes' largest key, the first one among equals. Every lane gets it.
__device__ inline int best_of(float key, int index) {
  for (int by = 16; by; by /= 2) {
    const float other = __shfl_xor_sync(~0u, key, by);
    const int at = __shfl_xor_sync(~0u, index, by);
    if (other > key || (other == key && at < index)) key = other, index = at;
  }
  return index;
}

// Sets the keys to 0 in all but KEPT of GROUPS groups of neighbouring experts, those with the largest sums of two keys.
template <int EXPERTS, int GROUPS, int KEPT, int EACH>
__device__ inline void keep_groups(float (&key)[EACH], float least) {
  constexpr int SIZE = EXPERTS / GROUPS;
  const int lane = threadIdx.x & 31;
  float own = least;  // the sum of group `lane`
  for (int group = 0; group < GROUPS; ++group) {
    float first = least, second = least;
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      const int i = lane + 32 * e;
      if (i >= EXPERTS || i / SIZE != group) continue;
      second = fmaxf(second, fminf(first, key[e]));
      first = fmaxf(first, key[e]);
    }
    for (int by = 16; by; by /= 2) {
      const float one = __shfl_xor_sync(~0u, first, by), two = __shfl_xor_sync(~0u, second, by);
      second = fmaxf(fminf(first, one), fmaxf(second, two));
      first = fmaxf(first, one);
    }
    if (lane == group) own = first + second;
  }
  unsigned kept = 0;
  for (int k = 0; k < KEPT; ++k) {
    const int group = best_of(own, lane);
    if (lane == group) own = least;
    kept |= 1u << group;
  }
#pragma unroll
  for (int e = 0; e < EACH; ++e) {
    const int i = lane + 32 * e;
    if (i < EXPERTS && !(kept >> i / SIZE & 1)) key[e] = 0.0f;
  }
}

// A warp's token: the TOP experts with the largest scores, with `bias` added for the choice, and the weights of their outputs.
// With SHARED, expert EXPERTS is chosen by each token: its weight is 1, or, if GATED, the sigmoid of its logit. A token has
// `width` logits.
template <int EXPERTS, int TOP, Score SCORE, Rounds ROUNDS, bool BIASED, bool NORMALIZED, int GROUPS, int KEPT, bool SCALED, bool SHARED,
          bool GATED, typename L, typename B, typename S, typename W>
__device__ inline void choose_experts(const L* logits, const B* bias, const S* scales, unsigned* chosen, W* weights, int token,
                                      int width, float epsilon, float factor) {
  constexpr int EACH = (EXPERTS + 31) / 32, ALL = TOP + SHARED;
  const int lane = threadIdx.x & 31;
  const float least = __int_as_float(0xff800000);
  float score[EACH], key[EACH];
#pragma unroll
  for (int e = 0; e < EACH; ++e) {
    const int i = lane + 32 * e;
    score[e] = i < EXPERTS ? wide(logits[size_t(token) * width + i]) : least;
  }
  if (SCORE == SOFTMAX) {
    float most = least, sum = 0.0f;
#pragma unroll
    for (int e = 0; e < EACH; ++e) most = fmaxf(most, score[e]);
    most = largest(most);
#pragma unroll
    for (int e = 0; e < EACH; ++e) sum += score[e] = __expf(score[e] - most);
    sum = total(sum);
#pragma unroll
    for (int e = 0; e < EACH; ++e) score[e] /= sum;
  }
#pragma unroll
  for (int e = 0; e < EACH; ++e) {
    const int i = lane + 32 * e;
    if (SCORE == SIGMOID) score[e] = 1.0f / (1.0f + __expf(-score[e]));
    if (ROUNDS != NOTHING) score[e] = wide(narrow(score[e], L()));
    key[e] = i >= EXPERTS ? least : BIASED ? score[e] + wide(bias[i]) : score[e];
    if (ROUNDS == KEYS) key[e] = wide(narrow(key[e], L()));
  }
  if constexpr (GROUPS > 1) keep_groups<EXPERTS, GROUPS, KEPT>(key, least);
  int own = 0;
  float weight = SCORE == CHOSEN_SOFTMAX ? least : 0.0f;  // lane t has the expert and the weight of choice t
  for (int t = 0; t < TOP; ++t) {
    float best = least, its = 0.0f;
    int index = lane;
#pragma unroll
    for (int e = 0; e < EACH; ++e)
      if (key[e] > best) best = key[e], index = lane + 32 * e;
    index = min(best_of(best, index), EXPERTS - 1);
#pragma unroll
    for (int e = 0; e < EACH; ++e)
      if (lane + 32 * e == index) its = score[e], key[e] = least;
    its = __shfl_sync(~0u, its, index & 31);
    if (lane == t) own = index, weight = its;
  }
  if (SCORE == CHOSEN_SOFTMAX) {
    weight = __expf(weight - largest(weight));
    weight /= total(weight);
  }
  if (NORMALIZED) weight /= total(weight) + epsilon;
  weight *= factor;
  if (lane >= ALL) return;
  if (SHARED && lane == TOP) {
    own = EXPERTS;
    weight = GATED ? 1.0f / (1.0f + __expf(-wide(logits[size_t(token) * width + EXPERTS]))) : 1.0f;
  } else if (SCALED) {
    weight *= wide(scales[own]);
  }
  chosen[token * ALL + lane] = own;
  weights[token * ALL + lane] = narrow(weight, W());
}

// Eight numbers of a token: its experts' outputs, weighted, plus those of shared experts, times a gate's sigmoid if GATED.
template <int TOP, int WIDTH, bool SHARED, bool GATED, typename T, typename W>
__device__ inline void combine_experts(const T* y, const W* weights, const T* shared, const T* gate, T* out, int tokens) {
  const size_t i = (size_t(blockIdx.x) * blockDim.x + threadIdx.x) * 8, token = i / WIDTH, at = i % WIDTH;
  if (token >= tokens) return;
  float sum[8] = {};
#pragma unroll
  for (int t = 0; t < TOP; ++t) {
    const float weight = wide(weights[token * TOP + t]);
    const Several<T, 8> eight = several<8>(y + (token * TOP + t) * WIDTH + at);
    for (int e = 0; e < 8; ++e) sum[e] += weight * wide(eight.of[e]);
  }
  if (SHARED) {
    const float factor = GATED ? 1.0f / (1.0f + __expf(-wide(gate[token]))) : 1.0f;
    const Several<T, 8> eight = several<8>(shared + i);
    for (int e = 0; e < 8; ++e) sum[e] = rounded<T>(sum[e]) + (GATED ? rounded<T>(factor * wide(eight.of[e])) : wide(eight.of[e]));
  }
  Several<T, 8> eight;
  for (int e = 0; e < 8; ++e) eight.of[e] = narrow(sum[e], T());
  *reinterpret_cast<Several<T, 8>*>(out + i) = eight;
}

}  // namespace treadle
