// The steps that make a pixel from itself: normalization, jitter, grayscale, erasing.
//
// Included by kernel.cu. lower_values.py writes the calls: PLAN_PER_PIXEL takes all
// channels, before the blur if there is one; PLAN_PER_VALUE follows at the store and takes
// one at a time. The formulas are explained in apply_values.py.

enum Adjustment { BRIGHTNESS = 1, CONTRAST, SATURATION, HUE };  // digits of an order

// The orders of Jitter.ORDERS in values.py, the first adjustment in the lowest digit.
__device__ int order_of(float index) {
  static constexpr int orders[] = {
      0x4321, 0x3421, 0x4231, 0x2431, 0x3241, 0x2341, 0x4312, 0x3412,
      0x4132, 0x1432, 0x3142, 0x1342, 0x4213, 0x2413, 0x4123, 0x1423,
      0x2143, 0x1243, 0x3214, 0x2314, 0x3124, 0x1324, 0x2134, 0x1234,
  };
  return orders[int(index)];
}

struct Factors {  // of one sample; what is not adjusted is not read
  float brightness, contrast, saturation, hue;
};

// N channels of one pixel, from `channel` on, in units of the range [0, 1].
template <int N>
struct Values {
  float (&value)[N];
  const int channel;
  const int x, y;    // of the pixel, in the frame that the launch makes
  const float mean;  // of the image's grey where a jitter's contrast needs it

  template <int POINT>
  __device__ void scale() {
#pragma unroll
    for (int c = 0; c < N; ++c) {
      const int here = CHANNELS % N == 0 ? channel + c : min(channel + c, CHANNELS - 1);
      value[c] = fmaf(value[c], POINT_SCALE[POINT][here], POINT_BIAS[POINT][here]);
    }
  }

  __device__ void erase(float left, float top, float width, float height, float filling) {
    const bool is_inside = x >= left && x < left + width && y >= top && y < top + height;
#pragma unroll
    for (int c = 0; c < N; ++c) value[c] = is_inside ? filling : value[c];
  }

  __device__ void weigh(const float (&weights)[N]) {
    float sum = 0.0f;
#pragma unroll
    for (int c = 0; c < N; ++c) sum = fmaf(weights[c], value[c], sum);
#pragma unroll
    for (int c = 0; c < N; ++c) value[c] = sum;
  }

  // This block's share of the pixel's grey: all of it where it has all channels.
  __device__ float grey() const {
    if constexpr (CHANNELS == 3 && N == 3)
      return fmaf(0.114f, value[2], fmaf(0.587f, value[1], 0.299f * value[0]));
    float sum = 0.0f;
#pragma unroll
    for (int c = 0; c < N; ++c)
      if (channel + c < CHANNELS) sum += value[c];
    return sum * (1.0f / CHANNELS);
  }

  // In a mean launch it ends where the contrast would need the mean.
  template <bool IS_JIGGLE, int STEPS>
  __device__ void jitter(int order, const Factors& factor) {
    mix(1.0f, 0.0f);
#pragma unroll 1
    for (int rest = order; rest != 0; rest >>= 4) {
      const int step = rest & 15;
      if (has(STEPS, BRIGHTNESS) && step == BRIGHTNESS) {
        if (IS_JIGGLE) mix(1.0f, factor.brightness - 1.0f);
        else mix(factor.brightness, 0.0f);
      } else if (has(STEPS, CONTRAST) && step == CONTRAST) {
        if (IS_MEAN && !IS_JIGGLE) return;
        mix(factor.contrast, IS_JIGGLE ? 0.0f : mean * (1.0f - factor.contrast));
      } else if (has(STEPS, SATURATION) && step == SATURATION) {
        if constexpr (IS_JIGGLE && N == 3) scale_saturation(factor.saturation);
        else mix(factor.saturation, grey() * (1.0f - factor.saturation));
      } else if (has(STEPS, HUE) && step == HUE) {
        if constexpr (N == 3) shift_hue(factor.hue);
      }
    }
  }

 private:
  static __device__ constexpr bool has(int steps, int step) { return steps >> step & 1; }

  // factor * value + offset, limited to [0, 1].
  __device__ void mix(float factor, float offset) {
#pragma unroll
    for (int c = 0; c < N; ++c) value[c] = __saturatef(fmaf(factor, value[c], offset));
  }

  __device__ float top() const { return fmaxf(fmaxf(value[0], value[1]), value[2]); }
  __device__ float low() const { return fminf(fminf(value[0], value[1]), value[2]); }

  __device__ void scale_saturation(float factor) {
    const float high = top(), spread = high - low();
    const float share = fminf(factor, __fdividef(high, fmaxf(spread, 1e-30f)));
#pragma unroll
    for (int c = 0; c < 3; ++c) value[c] = __saturatef(high - (high - value[c]) * share);
  }

  __device__ void shift_hue(float turns) {
    const float red = value[0], green = value[1], blue = value[2];
    const float high = top(), spread = high - low();
    const float inverse = __fdividef(1.0f, fmaxf(spread, 1e-30f));
    const bool is_red = red >= green && red >= blue, is_green = green >= blue;
    const float ahead = is_red ? green : is_green ? blue : red;
    const float behind = is_red ? blue : is_green ? red : green;
    const float start = is_red ? 0.0f : is_green ? 2.0f : 4.0f;
    const float hue = fmaf(ahead - behind, inverse, fmaf(6.0f, turns, start));
#pragma unroll
    for (int c = 0; c < 3; ++c) {
      float place = hue + float(5 - 2 * c);
      place -= 6.0f * floorf(place * (1.0f / 6.0f));
      const float share = __saturatef(fminf(place, 4.0f - place));
      value[c] = __saturatef(high - spread * share);
    }
  }
};
