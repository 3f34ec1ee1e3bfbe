// A whole augmentation plan in one launch: geometry, blur, pointwise, cast, layout.
//
// lower.py puts a header of #defines in front of this file: the pixel types, the tile, and
// the plan. What is not in the plan is not in the machine code.
//
// One block makes one tile of one sample: TILE_X x TILE_Y output pixels, CHUNK channels.
// (A *mean launch* goes the same way up to the values of its pixels, and leaves their sum.)
//
//   prepare   One thread turns the sample's drawn numbers into maps, and asks which
//             rectangle of the source the tile needs.
//   stage     If that rectangle fits, it is copied to shared memory: one texel holds all
//             channels of a pixel, 16 bits each where that is exact. Padding, flips and
//             crops of the source are settled here.
//   warp      Every pixel of the tile, and of the blur's margin around it, is read through
//             the chain of maps. The steps before the blur change its values.
//   blur      A thread blurs a strip 4 pixels wide: rows from shared memory, columns in its
//             registers. It also applies the steps behind the blur and stores.
//
// Coordinates: pixel centres are whole numbers, y points down. A *frame* is an image size
// somewhere in the chain. A *level* reads one frame between its pixels and so makes the
// next one. Between levels lies a *view*: a crop or flip, index = first + step * i.
//
// Numbers: a source of integers stays in its own units (0 to 255) until its values are
// changed; the first factor is 1 / 255 then. All arithmetic is float32.
//
// The same file runs on the CPU, for the tests: with ON_CPU defined, another header
// replaces the thread indices, the barrier and the conversions. That works because every
// thread starts anew in each PHASE: only shared memory lives on to the next.

// What the plan may ask for ------------------------------------------------------------

enum Interpolation { BILINEAR, ROUND, EXACT };  // EXACT: pixel floor((i + 0.5) * scale)
enum Border { ZEROS, CLAMP, REFLECT_CENTRES, REFLECT_EDGES, FILL };
enum Margin {
  MARGIN_NONE,  // nothing beyond the edge is ever read
  MARGIN_CONSTANT,
  MARGIN_REFLECT,
  MARGIN_REPLICATE,
  MARGIN_CIRCULAR
};

enum Side { SIDE_SHORT, SIDE_LONG, SIDE_VERT, SIDE_HORZ };

struct LevelKind {  // what is known of a level when the kernel is compiled
  Interpolation interpolation;
  Border border;
  bool is_aligned;  // x depends on x only and y on y only: a resize, not a rotation
  int fill;         // row of FILLS
};

// What the header says --------------------------------------------------------------

constexpr int THREADS = PLAN_THREADS, MIN_BLOCKS = PLAN_MIN_BLOCKS;
constexpr int TILE_X = PLAN_TILE_X, TILE_Y = PLAN_TILE_Y, STRIP = PLAN_STRIP;
constexpr int CHANNELS = PLAN_CHANNELS;  // of the image
constexpr int CHUNK = PLAN_CHUNK;        // of one block
constexpr int STAGE_TEXELS = PLAN_STAGE_TEXELS;  // room for the source; 0: never staged
constexpr int PACK_WIDTH = PLAN_PACK_WIDTH;      // numbers per sample
constexpr int LEVELS = PLAN_LEVELS;
__device__ constexpr LevelKind kind_of(int level) {  // innermost first
  constexpr LevelKind kinds[] = {PLAN_KINDS};        // one dummy where there is no level
  return kinds[level];
}
constexpr bool IS_SINGLE = PLAN_SINGLE;      // one read, places followed level by level
constexpr bool IS_EXTENDED = PLAN_EXTENDED;  // one read, maps multiplied
constexpr bool IS_TOP_VIEW = PLAN_TOP_VIEW;  // a view lies above the last level
constexpr Interpolation SINGLE_READ = PLAN_SINGLE_READ;
constexpr Margin PADDING = PLAN_PADDING;  // beyond the canvas
constexpr int PADDING_FILL = PLAN_PADDING_FILL;
constexpr int RADIUS_X = PLAN_RADIUS_X, RADIUS_Y = PLAN_RADIUS_Y;
constexpr Margin BLUR_MARGIN = PLAN_BLUR_MARGIN;
constexpr int SIGMA_COLUMN = PLAN_SIGMA_COLUMN, SKIP_COLUMN = PLAN_SKIP_COLUMN;
constexpr bool IS_MEAN = PLAN_IS_MEAN;    // leaves sums of grey values, not pixels
constexpr bool HAS_MEAN = PLAN_HAS_MEAN;  // and this launch reads them
__constant__ float POINT_SCALE[][CHANNELS] = {PLAN_POINT_SCALE};
__constant__ float POINT_BIAS[][CHANNELS] = {PLAN_POINT_BIAS};
__constant__ float FILLS[][CHANNELS] = {PLAN_FILLS};  // in the source's units

#if !ON_CPU
// CUDA ---------------------------------------------------------------------------------

#define IS_HOPPER (__CUDA_ARCH__ >= 900)
#define PHASE
#define BARRIER() __syncthreads()
#define STATIC_SHARED __shared__
#define DYNAMIC_SHARED(name) extern __shared__ __align__(16) unsigned char name[]

typedef unsigned short Bits16;  // a half or a bfloat16

__device__ float half_to_float(Bits16 bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}
__device__ Bits16 float_to_half(float value) {
  Bits16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
__device__ Bits16 float_to_bfloat(float value) {
  unsigned both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(0.0f), "f"(value));
  return Bits16(both);
}
template <class Vector>
__device__ Vector read_as(const void* address) {
  return *static_cast<const Vector*>(address);
}
template <class Vector>
__device__ void write_as(void* address, Vector value) {
  *static_cast<Vector*>(address) = value;
}
#endif

__device__ float bfloat_to_float(Bits16 bits) { return __int_as_float(int(bits) << 16); }

// Pixel types --------------------------------------------------------------------------

// Whole numbers below 2^23 become floats. Before Hopper a conversion is slow; adding 2^23
// leaves the number in the low bits of the mantissa.
__device__ float whole_to_float(unsigned value) {
#if IS_HOPPER
  return float(int(value));
#else
  return __int_as_float(int(0x4B000000u | value)) - 8388608.0f;
#endif
}

// A staged texel holds CHUNK values: as 16 bits where that loses nothing (8-bit numbers are
// exact in half precision), otherwise as floats.
constexpr int LANES = CHUNK == 3 ? 4 : CHUNK;

#if SOURCE_U8
typedef unsigned char Source;
__device__ float load(const Source* p) { return whole_to_float(__ldg(p)); }
#elif SOURCE_U16
typedef unsigned short Source;
__device__ float load(const Source* p) { return whole_to_float(__ldg(p)); }
#elif SOURCE_F16
typedef Bits16 Source;
__device__ float load(const Source* p) { return half_to_float(__ldg(p)); }
#elif SOURCE_BF16
typedef Bits16 Source;
__device__ float load(const Source* p) { return bfloat_to_float(__ldg(p)); }
#else
typedef float Source;
__device__ float load(const Source* p) { return __ldg(p); }
#endif

#if STAGE_16 && SOURCE_BF16
typedef Bits16 Lane;
__device__ Lane encode_value(float value) { return float_to_bfloat(value); }
__device__ float decode(Lane lane) { return bfloat_to_float(lane); }
#elif STAGE_16
typedef Bits16 Lane;
__device__ Lane encode_value(float value) { return float_to_half(value); }
__device__ float decode(Lane lane) { return half_to_float(lane); }
#else
typedef float Lane;
__device__ Lane encode_value(float value) { return value; }
__device__ float decode(Lane lane) { return lane; }
#endif
__device__ Lane encode(const Source* p) { return encode_value(load(p)); }

struct alignas(LANES * sizeof(Lane)) Texel {
  Lane lane[LANES];
};

// One load of the whole texel, then one conversion per channel.
__device__ void unpack(const Texel& texel, float (&value)[LANES]) {
  const Texel whole = texel;
#pragma unroll
  for (int c = 0; c < LANES; ++c) value[c] = decode(whole.lane[c]);
}

#if OUTPUT_F16 || OUTPUT_BF16
typedef Bits16 Output;
__device__ Output to_output(float value) {
#if OUTPUT_F16
  return float_to_half(value);
#else
  return float_to_bfloat(value);
#endif
}
__device__ void store_quad(Output* out, const float (&v)[4]) {
  const unsigned low = to_output(v[0]) | unsigned(to_output(v[1])) << 16;
  const unsigned high = to_output(v[2]) | unsigned(to_output(v[3])) << 16;
  write_as<uint2>(out, uint2{low, high});
}
#else
typedef float Output;
__device__ Output to_output(float value) { return value; }
__device__ void store_quad(Output* out, const float (&v)[4]) {
  write_as<float4>(out, float4{v[0], v[1], v[2], v[3]});
}
#endif

__device__ void load_quad(const float* in, float* out) {
  const float4 v = read_as<float4>(in);
  out[0] = v.x, out[1] = v.y, out[2] = v.z, out[3] = v.w;
}

constexpr int HALO_X = TILE_X + 2 * RADIUS_X;  // the tile and the blur's margin
constexpr int HALO_Y = TILE_Y + 2 * RADIUS_Y;
constexpr int ROW = (TILE_X + 2 * RADIUS_X + 3) / 4 * 4;  // floats from row to row
constexpr int PLANE = ROW * HALO_Y;
constexpr bool HAS_BLUR = RADIUS_X > 0 || RADIUS_Y > 0;
constexpr int CHUNKS = (CHANNELS + CHUNK - 1) / CHUNK;
// Two levels, the inner one a plain resize: read as one block of 3 x 3 source pixels.
constexpr bool IS_COMPOSED = !IS_SINGLE && !IS_EXTENDED && LEVELS == 2 && kind_of(0).is_aligned &&
                             kind_of(0).interpolation == BILINEAR &&
                             kind_of(0).border == CLAMP &&
                             kind_of(1).interpolation == BILINEAR;
constexpr int ACTIVE = IS_EXTENDED && LEVELS > 1 ? 1 : LEVELS;  // levels that are read
constexpr int TAPS = IS_COMPOSED ? 3 : 2;

// The sample's maps --------------------------------------------------------------------

struct View {
  int first_x, first_y, step_x, step_y;
};

struct Level {
  float xx, xy, x0, yx, yy, y0;  // place in the frame it reads: u = xx x + xy y + x0
  int width, height;             // size of that frame
};

struct Image {
  const Source* base;
  int width, height;
  int stride_c, stride_y, stride_x;  // in elements; one image stays below 2^31 of them
};

struct Arguments {
  const Source* source;  // (B, C, H, W) with any strides
  Output* out;           // (B, C, h, w), contiguous or channels_last
  const float* pack;     // (B, PACK_WIDTH)
  const Image* images;   // per sample, instead of source, sizes and strides (IS_RAGGED)
  long long height, width, stride_b, stride_c, stride_y, stride_x;
  long long out_height, out_width;
  const float* sums;  // (B, num_sums): what the tiles of the mean launch left (HAS_MEAN)
  long long num_sums;
};

// The same for all threads of a block, so that addresses are a uniform base + 32 bits.
__device__ Image image_of(const Arguments& a, int sample) {
#if IS_RAGGED
  return a.images[sample];
#else
  return Image{a.source + sample * a.stride_b, int(a.width),    int(a.height),
               int(a.stride_c),                int(a.stride_y), int(a.stride_x)};
#endif
}

struct Geometry {
  Level level[LEVELS > 0 ? LEVELS : 1];
  View view[LEVELS + 1];  // view[k] lies below level k, the last one above all levels
  int canvas_left, canvas_top, canvas_right, canvas_bottom;  // source pixels in reach
  int left, top, right, bottom;        // pixels of the last frame that this tile reads
  int stage_x, stage_y, stage_width, stage_height, stage_row;  // staged rectangle
  bool is_staged, is_inner;
  float weight_x[RADIUS_X + 1], weight_y[RADIUS_Y + 1];  // blur, from the centre outward
};

// Turns steps into levels and views, from the source outward. Only one thread runs it.
struct Builder {
  Geometry& g;
  const int image_width, image_height;
  int width, height;  // the frame reached so far
  View view;          // from that frame to the output of the last level

  __device__ Builder(Geometry& geometry, const Image& image)
      : g(geometry),
        image_width(image.width),
        image_height(image.height),
        width(image.width),
        height(image.height),
        view{0, 0, 1, 1} {
    canvas();
  }

  __device__ void crop(int left, int top, int new_width, int new_height) {
    view.first_x += view.step_x * left;
    view.first_y += view.step_y * top;
    width = new_width;
    height = new_height;
  }

  // The frame as it is now becomes the canvas, beyond which the padding lies.
  __device__ void canvas() {
    const int end_x = view.first_x + view.step_x * (width - 1);
    const int end_y = view.first_y + view.step_y * (height - 1);
    g.canvas_left = min(view.first_x, end_x);
    g.canvas_right = max(view.first_x, end_x);
    g.canvas_top = min(view.first_y, end_y);
    g.canvas_bottom = max(view.first_y, end_y);
  }

  __device__ void flip_x() {
    view.first_x += view.step_x * (width - 1);
    view.step_x = -view.step_x;
  }

  __device__ void flip_y() {
    view.first_y += view.step_y * (height - 1);
    view.step_y = -view.step_y;
  }

  template <int K>
  __device__ void level(float xx, float xy, float x0, float yx, float yy, float y0,
                        int new_width, int new_height) {
    // A flip between two levels is folded into the outer map, so that the inner one is
    // read in ascending order. (A flip of the source itself costs nothing: see stage.)
    constexpr bool MAY_FOLD = K > 0 && kind_of(K).interpolation != EXACT;
    if (MAY_FOLD && view.step_x < 0) {
      xx = -xx, xy = -xy, x0 = (width - 1) - x0;
      view.first_x -= width - 1, view.step_x = 1;
    }
    if (MAY_FOLD && view.step_y < 0) {
      yx = -yx, yy = -yy, y0 = (height - 1) - y0;
      view.first_y -= height - 1, view.step_y = 1;
    }
    g.level[K] = Level{xx, xy, x0, yx, yy, y0, width, height};
    g.view[K] = view;
    view = View{0, 0, 1, 1};
    width = new_width;
    height = new_height;
  }

  template <int K, bool CORNERS>
  __device__ void resize(int new_width, int new_height) {
    if (kind_of(K).interpolation == EXACT) {
      level<K>(float(width) / new_width, 0, 0, 0, float(height) / new_height, 0,
               new_width, new_height);
    } else if (CORNERS) {
      const float sx = new_width > 1 ? float(width - 1) / float(new_width - 1) : 0.0f;
      const float sy = new_height > 1 ? float(height - 1) / float(new_height - 1) : 0.0f;
      level<K>(sx, 0, 0, 0, sy, 0, new_width, new_height);
    } else {
      const float sx = float(width) / new_width, sy = float(height) / new_height;
      level<K>(sx, 0, 0.5f * sx - 0.5f, 0, sy, 0.5f * sy - 0.5f, new_width, new_height);
    }
  }

  // One side given, the other keeps the aspect ratio (Resize.output_size in plan.py).
  template <int K, bool CORNERS, Side SIDE>
  __device__ void resize_side(int size) {
    const double ratio = double(width) / double(height);
    const bool names_height =
        SIDE == SIDE_VERT || (SIDE != SIDE_HORZ && (SIDE == SIDE_SHORT) != (ratio < 1.0));
    resize<K, CORNERS>(names_height ? int(size * ratio) : size,
                       names_height ? size : int(size / ratio));
  }

  // The map c + L (p - c - shift) with the frame's centre c.
  template <int K>
  __device__ void about_centre(float xx, float xy, float yx, float yy, float shift_x,
                               float shift_y) {
    const float cx = 0.5f * (width - 1), cy = 0.5f * (height - 1);
    const float from_x = shift_x + cx, from_y = shift_y + cy;
    level<K>(xx, xy, cx - (xx * from_x + xy * from_y), yx, yy,
             cy - (yx * from_x + yy * from_y), width, height);
  }

  template <int K>
  __device__ void rotate(float degrees, bool is_skipped) {
    float sine = 0.0f, cosine = 1.0f;
    if (!is_skipped) sincosf(degrees * 0.017453292519943295f, &sine, &cosine);
    about_centre<K>(cosine, -sine, sine, cosine, 0.0f, 0.0f);
  }

  // Inverse of kornia.geometry.transform.get_affine_matrix2d, see geometry.py.
  template <int K>
  __device__ void affine(float degrees, float shift_x, float shift_y, float scale_x,
                         float scale_y, float shear_x, float shear_y, bool is_skipped) {
    if (is_skipped) return about_centre<K>(1.0f, 0.0f, 0.0f, 1.0f, 0.0f, 0.0f);
    float sine, cosine;
    sincosf(degrees * 0.017453292519943295f, &sine, &cosine);
    const float tan_x = tanf(shear_x * 0.017453292519943295f);
    const float tan_y = tanf(shear_y * 0.017453292519943295f);
    const float top_x = cosine / scale_x, top_y = sine / scale_x;
    const float low_x = -sine / scale_y, low_y = cosine / scale_y;
    const float both = 1.0f + tan_x * tan_y;
    about_centre<K>(both * top_x + tan_x * low_x, both * top_y + tan_x * low_y,
                    tan_y * top_x + low_x, tan_y * top_y + low_y, shift_x, shift_y);
  }

  __device__ void finish() {
    // The view above the last level is folded into that level's map where it interpolates.
    if (LEVELS > 0 && kind_of(LEVELS > 0 ? LEVELS - 1 : 0).interpolation != EXACT) {
      Level& last = g.level[LEVELS > 0 ? LEVELS - 1 : 0];
      last.x0 += last.xx * view.first_x + last.xy * view.first_y;
      last.y0 += last.yx * view.first_x + last.yy * view.first_y;
      last.xx *= view.step_x, last.yx *= view.step_x;
      last.xy *= view.step_y, last.yy *= view.step_y;
      view = View{0, 0, 1, 1};
    }
    g.view[LEVELS] = view;
    if (IS_EXTENDED && LEVELS > 0) collapse();
  }

  // All maps multiplied into one that reads the whole image.
  __device__ void collapse() {
    Level m = g.level[LEVELS > 0 ? LEVELS - 1 : 0];
#pragma unroll
    for (int k = LEVELS - 1; k >= 0; --k) {
      const View& v = g.view[k];
      m.xx *= v.step_x, m.xy *= v.step_x, m.x0 = v.first_x + v.step_x * m.x0;
      m.yx *= v.step_y, m.yy *= v.step_y, m.y0 = v.first_y + v.step_y * m.y0;
      if (k == 0) break;
      const Level& n = g.level[k - 1];
      m = Level{n.xx * m.xx + n.xy * m.yx, n.xx * m.xy + n.xy * m.yy,
                n.xx * m.x0 + n.xy * m.y0 + n.x0, n.yx * m.xx + n.yy * m.yx,
                n.yx * m.xy + n.yy * m.yy, n.yx * m.x0 + n.yy * m.y0 + n.y0, 0, 0};
    }
    m.width = image_width, m.height = image_height;
    g.level[0] = m;
    g.view[0] = g.view[ACTIVE] = View{0, 0, 1, 1};
    g.canvas_left = 0, g.canvas_right = m.width - 1;
    g.canvas_top = 0, g.canvas_bottom = m.height - 1;
  }
};

// Which pixels of the source a tile reads ----------------------------------------------

struct Range {
  int low, high;
};

// The pixels that places in [low, high] of an axis read: `taps` from floor(place) on.
__device__ Range reach(float low, float high, int size, int taps, bool may_fold) {
  if (may_fold && (low < 0.0f || high > size - 1.0f)) return Range{0, max(size, taps) - 1};
  const float last = float(max(size - taps, 0));
  // Limited as floats: far outside, the number would not fit into an int.
  constexpr float SLACK = 0.0625f;  // more than rounding can move a place
  const int first = int(floorf(fminf(fmaxf(low - SLACK, 0.0f), last)));
  const int end = int(floorf(fminf(fmaxf(high + SLACK, 0.0f), size - 1.0f))) + taps - 1;
  return Range{first, max(min(end, size - 1), first + taps - 1)};
}

__device__ Range through(int first, int step, Range r) {
  const int a = first + step * r.low, b = first + step * r.high;
  return Range{min(a, b), max(a, b)};
}

__device__ float lowest(float a, float b, Range r) { return fminf(a * r.low, a * r.high) + b; }
__device__ float highest(float a, float b, Range r) { return fmaxf(a * r.low, a * r.high) + b; }

__device__ void find_stage(Geometry& g) {
  Range x = {g.left, g.right}, y = {g.top, g.bottom};
  float shrink = 0.0f;  // source pixels per pixel of the composed inner level
#pragma unroll
  for (int k = ACTIVE - 1; k >= 0; --k) {
    const Level& l = g.level[k];
    x = through(g.view[k + 1].first_x, g.view[k + 1].step_x, x);
    y = through(g.view[k + 1].first_y, g.view[k + 1].step_y, y);
    const bool may_fold = kind_of(k).border == REFLECT_CENTRES ||
                          kind_of(k).border == REFLECT_EDGES;
    const float half = kind_of(k).interpolation == EXACT ? 0.5f : 0.0f;
    const float u0 = l.x0 + half * l.xx, v0 = l.y0 + half * l.yy;
    const int taps = k == 0 ? TAPS : 2;
    const Range u = reach(lowest(l.xx, 0, x) + lowest(l.xy, u0, y),
                          highest(l.xx, 0, x) + highest(l.xy, u0, y), l.width, taps, may_fold);
    y = reach(lowest(l.yx, 0, x) + lowest(l.yy, v0, y),
              highest(l.yx, 0, x) + highest(l.yy, v0, y), l.height, taps, may_fold);
    x = u;
    if (IS_COMPOSED && k == 0) shrink = fmaxf(l.xx, l.yy);
  }
  g.stage_x = x.low;
  g.stage_y = y.low;
  g.stage_width = x.high - x.low + 1;
  g.stage_height = y.high - y.low + 1;
  g.stage_row = g.stage_width | 1;  // odd: neighbours in y lie in different banks
  const bool fits = (long long)(g.stage_row) * g.stage_height <= STAGE_TEXELS;
  g.is_staged = fits && shrink <= 1.0f;
}

// Reading the source -------------------------------------------------------------------

__device__ int fold(int i, int low, int high) {  // reflect about the outermost pixels
  i = i < low ? 2 * low - i : i;
  i = i > high ? 2 * high - i : i;
  return min(max(i, low), high);
}

// One source index: seen through the view, and moved onto the canvas or marked as beyond.
__device__ int source_index(int i, int first, int step, int low, int high, bool& is_inside) {
  const int index = first + step * i;
  if (PADDING == MARGIN_NONE) return index;
  if (PADDING == MARGIN_REFLECT) return fold(index, low, high);
  if (PADDING == MARGIN_CONSTANT) is_inside = is_inside && index >= low && index <= high;
  return min(max(index, low), high);
}

// Reads straight from device memory. Right for any footprint, slow for a rotated one.
struct Direct {
  static constexpr bool IS_STAGED = false;
  const Geometry& g;
  int channel;
  Image image;

  __device__ unsigned column(int x, bool& is_inside) const {
    return unsigned(image.stride_x * source_index(x, g.view[0].first_x, g.view[0].step_x,
                                                  g.canvas_left, g.canvas_right,
                                                  is_inside));
  }

  __device__ unsigned row(int y, bool& is_inside) const {
    return unsigned(image.stride_y * source_index(y, g.view[0].first_y, g.view[0].step_y,
                                                  g.canvas_top, g.canvas_bottom,
                                                  is_inside));
  }

  __device__ void add_at(unsigned offset, bool is_inside, float weight,
                         float (&sum)[CHUNK]) const {
#pragma unroll
    for (int c = 0; c < CHUNK; ++c) {
      const int here = min(channel + c, CHANNELS - 1);  // the last chunk may be short
      const unsigned at = offset + unsigned(here * image.stride_c);
      const float value = is_inside ? load(image.base + at) : FILLS[PADDING_FILL][here];
      sum[c] = fmaf(weight, value, sum[c]);
    }
  }

  __device__ void add(int x, int y, float weight, float (&sum)[CHUNK]) const {
    bool is_inside = true;
    const unsigned offset = row(y, is_inside) + column(x, is_inside);
    add_at(offset, is_inside, weight, sum);
  }

  template <int N>
  __device__ void add_block(int x, int y, const float (&wx)[N], const float (&wy)[N],
                            int width, int height, float (&sum)[CHUNK]) const {
    unsigned columns[N], rows[N];
    bool is_column[N], is_row[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      is_column[i] = is_row[i] = true;
      columns[i] = column(min(x + i, width - 1), is_column[i]);
      rows[i] = row(min(y + i, height - 1), is_row[i]);
    }
#pragma unroll
    for (int j = 0; j < N; ++j)
#pragma unroll
      for (int i = 0; i < N; ++i)
        add_at(rows[j] + columns[i], is_row[j] && is_column[i], wx[i] * wy[j], sum);
  }
};

// Reads the rectangle in shared memory.
struct Staged {
  static constexpr bool IS_STAGED = true;
  const Geometry& g;
  int channel;
  const Texel* texels;

  __device__ void add(int x, int y, float weight, float (&sum)[CHUNK]) const {
    const Texel& t = texels[(y - g.stage_y) * g.stage_row + (x - g.stage_x)];
    float value[LANES];
    unpack(t, value);
#pragma unroll
    for (int c = 0; c < CHUNK; ++c) sum[c] = fmaf(weight, value[c], sum[c]);
  }

  template <int N>
  __device__ void add_block(int x, int y, const float (&wx)[N], const float (&wy)[N], int,
                            int, float (&sum)[CHUNK]) const {
    const Texel* row = texels + ((y - g.stage_y) * g.stage_row + (x - g.stage_x));
#pragma unroll
    for (int j = 0; j < N; ++j) {
      float along[CHUNK];
#pragma unroll
      for (int i = 0; i < N; ++i) {
        float value[LANES];
        unpack(row[i], value);
#pragma unroll
        for (int c = 0; c < CHUNK; ++c)
          along[c] = i == 0 ? wx[0] * value[c] : fmaf(wx[i], value[c], along[c]);
      }
#pragma unroll
      for (int c = 0; c < CHUNK; ++c) sum[c] = fmaf(wy[j], along[c], sum[c]);
      row += g.stage_row;
    }
  }
};

// Reading between pixels ---------------------------------------------------------------

// floor() without the conversion unit: adding 1.5 * 2^23 rounded down leaves the whole
// number in the low bits of the mantissa. For |value| < 2^22.
struct Floor {
  float value;
  int index;
};
__device__ Floor floor_of(float u) {
  constexpr float SHIFT = 12582912.0f;
  const float shifted = __fadd_rd(u, SHIFT);
  return Floor{shifted - SHIFT, __float_as_int(shifted) - 0x4B400000};
}

__device__ float saturate(float u) { return __saturatef(u); }

__device__ float fold_place(float u, float low, float high) {
  const float span = high - low;
  if (span <= 0.0f) return low;
  const float away = fabsf(u - low), flips = floorf(away / span);
  const float rest = away - flips * span;
  return fmodf(flips, 2.0f) == 0.0f ? low + rest : high - rest;
}

// A place moved into the frame, for borders that do so.
template <Border BORDER>
__device__ float confine(float u, int size) {
  if (BORDER == REFLECT_CENTRES) u = fold_place(u, 0.0f, size - 1.0f);
  if (BORDER == REFLECT_EDGES) u = fold_place(u, -0.5f, size - 0.5f);
  if (BORDER == CLAMP || BORDER == REFLECT_CENTRES || BORDER == REFLECT_EDGES)
    u = fminf(fmaxf(u, 0.0f), size - 1.0f);
  return u;
}

// Two neighbouring pixels inside the frame and the weights of a place between them. The
// weight of pixel i is 1 - |u - i|, at least 0: beyond the frame it fades to black.
struct Pair {
  float first;
  int index;
  float weight[2];
};
template <Border BORDER>
__device__ Pair pair_at(float u, int size) {
  u = confine<BORDER>(u, size);
  Pair p;
  const Floor f = floor_of(fminf(fmaxf(u, 0.0f), fmaxf(size - 2.0f, 0.0f)));
  const float d = u - f.value;
  p.first = f.value;
  p.index = f.index;
  p.weight[0] = saturate(1.0f - fabsf(d));
  p.weight[1] = size > 1 ? saturate(1.0f - fabsf(d - 1.0f)) : 0.0f;
  return p;
}

// Two neighbouring pixels of a resized frame as three of the frame below (scale <= 1).
struct Triple {
  int index;
  float weight[3];
};
__device__ Triple below(const Pair& p, float scale, float start, int size) {
  const float last = size - 1.0f;
  const float a = fminf(fmaxf(fmaf(p.first, scale, start), 0.0f), last);
  const float b = fminf(fmaxf(fmaf(p.first, scale, start + scale), 0.0f), last);
  const Floor f = floor_of(fminf(a, fmaxf(size - 3.0f, 0.0f)));
  const float da = a - f.value, db = b - f.value;  // both in [0, 2]
  Triple t;
  t.index = f.index;
  t.weight[0] = p.weight[0] * saturate(1.0f - da) + p.weight[1] * saturate(1.0f - db);
  t.weight[2] = p.weight[0] * saturate(da - 1.0f) + p.weight[1] * saturate(db - 1.0f);
  t.weight[1] = (p.weight[0] + p.weight[1]) - (t.weight[0] + t.weight[2]);
  return t;
}

// One pixel, nearest to a place; index -1: outside.
template <Interpolation HOW, Border BORDER>
__device__ int nearest(float u, int size) {
  if (HOW == EXACT) return min(int(floorf(u)), size - 1);
  u = confine<BORDER>(u, size);
  const float whole = rintf(fminf(fmaxf(u, -1.0f), float(size)));
  return whole < 0.0f || whole > size - 1.0f ? -1 : int(whole);
}

// Adds weight * (value of the frame above level K - 1 at pixel x, y).
template <int K, class Reader>
struct Chain {
  static __device__ void add(const Geometry& g, const Reader& source, int x, int y,
                             float weight, float (&sum)[CHUNK]) {
    constexpr LevelKind KIND = kind_of(K - 1);
    const Level& l = g.level[K - 1];
    const View& v = g.view[K - 1];
    const float half = KIND.interpolation == EXACT ? 0.5f : 0.0f;
    const float fx = float(x) + half, fy = float(y) + half;
    float u = fmaf(l.xx, fx, l.x0), w = fmaf(l.yy, fy, l.y0);
    if (!KIND.is_aligned) u = fmaf(l.xy, fy, u), w = fmaf(l.yx, fx, w);

    if constexpr (KIND.interpolation != BILINEAR) {
      const int ix = nearest<KIND.interpolation, KIND.border>(u, l.width);
      const int iy = nearest<KIND.interpolation, KIND.border>(w, l.height);
      if (ix < 0 || iy < 0) return fill(KIND, source, weight, sum);
      lower(g, source, v, ix, iy, weight, sum);
    } else {
      Pair px = pair_at<KIND.border>(u, l.width), py = pair_at<KIND.border>(w, l.height);
      if (KIND.border == FILL) {
        const float inside =
            (px.weight[0] + px.weight[1]) * (py.weight[0] + py.weight[1]);
        fill(KIND, source, weight * (1.0f - inside), sum);
      }
      py.weight[0] *= weight, py.weight[1] *= weight;
      if constexpr (K == 1) {
        source.add_block(px.index, py.index, px.weight, py.weight, l.width, l.height, sum);
      } else if constexpr (IS_COMPOSED && Reader::IS_STAGED) {
        const Level& inner = g.level[0];
        const Triple tx = below(px, inner.xx, fmaf(inner.xx, v.first_x, inner.x0),
                                inner.width);
        const Triple ty = below(py, inner.yy, fmaf(inner.yy, v.first_y, inner.y0),
                                inner.height);
        source.add_block(tx.index, ty.index, tx.weight, ty.weight, inner.width,
                         inner.height, sum);
      } else {
#pragma unroll 1
        for (int tap = 0; tap < 4; ++tap) {
          const float w2 = (tap & 1 ? px.weight[1] : px.weight[0]) *
                           (tap >> 1 ? py.weight[1] : py.weight[0]);
          const int ix = min(px.index + (tap & 1), l.width - 1);
          const int iy = min(py.index + (tap >> 1), l.height - 1);
          if (w2 != 0.0f) lower(g, source, v, ix, iy, w2, sum);
        }
      }
    }
  }

  static __device__ void lower(const Geometry& g, const Reader& source, const View& v,
                               int x, int y, float weight, float (&sum)[CHUNK]) {
    if constexpr (K == 1) {
      source.add(x, y, weight, sum);
    } else {
      Chain<K - 1, Reader>::add(g, source, v.first_x + v.step_x * x,
                                v.first_y + v.step_y * y, weight, sum);
    }
  }

  static __device__ void fill(const LevelKind kind, const Reader& source, float weight,
                              float (&sum)[CHUNK]) {
    if (kind.border != FILL) return;
#pragma unroll
    for (int c = 0; c < CHUNK; ++c)
      sum[c] += weight * FILLS[kind.fill][min(source.channel + c, CHANNELS - 1)];
  }
};

// 1 inside the frame, fading to 0 over one pixel beyond it.
__device__ float share_inside(float u, int size) {
  if (SINGLE_READ != BILINEAR) u = rintf(u);
  return saturate(u + 1.0f) * saturate(float(size) - u);
}

template <int K, class Reader>
__device__ void walk(const Geometry& g, const Reader& source, float& u, float& w,
                     float& weight, float (&sum)[CHUNK]) {
  if constexpr (K >= 0) {
    constexpr LevelKind KIND = kind_of(K);
    const Level& l = g.level[K];
    const float u0 = u, w0 = w;
    u = fmaf(l.xx, u0, l.x0), w = fmaf(l.yy, w0, l.y0);
    if (!KIND.is_aligned) u = fmaf(l.xy, w0, u), w = fmaf(l.yx, u0, w);
    if (KIND.border == ZEROS || KIND.border == FILL) {
      const float inside = share_inside(u, l.width) * share_inside(w, l.height);
      Chain<K + 1, Reader>::fill(KIND, source, weight * (1.0f - inside), sum);
      weight *= inside;
      u = fminf(fmaxf(u, 0.0f), l.width - 1.0f);
      w = fminf(fmaxf(w, 0.0f), l.height - 1.0f);
    }
    u = confine<KIND.border>(u, l.width);
    w = confine<KIND.border>(w, l.height);
    if (K > 0) {
      u = g.view[K].first_x + g.view[K].step_x * u;
      w = g.view[K].first_y + g.view[K].step_y * w;
    }
    walk<K - 1>(g, source, u, w, weight, sum);
  }
}

// One read for the whole chain: a place is followed from the last level to the first.
template <class Reader>
__device__ void add_single(const Geometry& g, const Reader& source, int x, int y,
                           float (&sum)[CHUNK]) {
  float u = float(x), w = float(y), weight = 1.0f;
  walk<LEVELS - 1>(g, source, u, w, weight, sum);
  const Level& l = g.level[0];
  if (SINGLE_READ == BILINEAR) {
    Pair px = pair_at<CLAMP>(u, l.width), py = pair_at<CLAMP>(w, l.height);
    py.weight[0] *= weight, py.weight[1] *= weight;
    source.add_block(px.index, py.index, px.weight, py.weight, l.width, l.height, sum);
  } else {
    source.add(int(rintf(u)), int(rintf(w)), weight, sum);
  }
}

// The value of the plan's geometry at one pixel of its output.
template <class Reader>
__device__ void read_pixel(const Geometry& g, const Reader& source, int x, int y,
                           float (&sum)[CHUNK]) {
#pragma unroll
  for (int c = 0; c < CHUNK; ++c) sum[c] = 0.0f;
  const View& v = g.view[ACTIVE];
  if (IS_TOP_VIEW) x = v.first_x + v.step_x * x, y = v.first_y + v.step_y * y;
  if constexpr (ACTIVE == 0) {
    source.add(x, y, 1.0f, sum);
  } else if constexpr (IS_SINGLE) {
    add_single(g, source, x, y, sum);
  } else {
    Chain<ACTIVE, Reader>::add(g, source, x, y, 1.0f, sum);
  }
}

// The phases ---------------------------------------------------------------------------

#include "values.cu"

__device__ int wrap(int i, int size) {  // the blur's border
  if (BLUR_MARGIN == MARGIN_REFLECT) {
    i = i < 0 ? -i : i;
    i = i >= size ? 2 * (size - 1) - i : i;
  } else if (BLUR_MARGIN == MARGIN_CIRCULAR) {
    i = i < 0 ? i + size : i;
    i = i >= size ? i - size : i;
  }
  return i;
}

// Which pixels of the last frame one axis of the tile reads, its margin included.
__device__ Range tile_range(int start, int length, int radius, int size) {
  const int low = start - radius, high = start + length - 1 + radius;
  if (BLUR_MARGIN == MARGIN_CIRCULAR && (low < 0 || high >= size))
    return Range{0, size - 1};
  return Range{max(low, 0), min(high, size - 1)};
}

__device__ void prepare(Geometry& g, const Arguments& a, int sample, int tile_x,
                        int tile_y) {
  const float* pack = a.pack + (long long)(sample) * PACK_WIDTH;
  Builder plan(g, image_of(a, sample));
  PLAN_STEPS
  plan.finish();
  const Range x = tile_range(tile_x, TILE_X, RADIUS_X, int(a.out_width));
  const Range y = tile_range(tile_y, TILE_Y, RADIUS_Y, int(a.out_height));
  g.left = x.low, g.right = x.high, g.top = y.low, g.bottom = y.high;
  g.is_inner = tile_x >= RADIUS_X && tile_x + TILE_X + RADIUS_X <= a.out_width &&
               tile_y >= RADIUS_Y && tile_y + TILE_Y + RADIUS_Y <= a.out_height;
  g.is_staged = false;
  if (STAGE_TEXELS > 0) find_stage(g);
}

// exp(-d^2 / (2 sigma^2)) for d = 0, 1, ..., divided by the sum over both sides.
template <int RADIUS>
__device__ void find_weight(float (&weights)[RADIUS + 1], const Arguments& a, int sample,
                            int d) {
  const float* pack = a.pack + (long long)(sample) * PACK_WIDTH;
  if (SKIP_COLUMN >= 0 && pack[max(SKIP_COLUMN, 0)] != 0.0f) {
    weights[d] = d == 0 ? 1.0f : 0.0f;
    return;
  }
  const float sigma = pack[SIGMA_COLUMN];
  float total = 1.0f;
  for (int i = 1; i <= RADIUS; ++i) total += 2.0f * expf(-0.5f * (i / sigma) * (i / sigma));
  weights[d] = expf(-0.5f * (d / sigma) * (d / sigma)) / total;
}

__device__ void stage(const Geometry& g, const Image& image, Texel* texels, int channel) {
  const int count = g.stage_width * g.stage_height;
  const float inverse = 1.0f / float(g.stage_width);
  const Level& l = g.level[0];
#pragma unroll 4
  for (int i = threadIdx.x; i < count; i += THREADS) {
    const int row = int((float(i) + 0.5f) * inverse);  // i / width, exact below 2^20
    const int column = i - row * g.stage_width;
    // A frame of 1 or 2 pixels is read as if it had 3; the weights there are 0.
    const int x = min(g.stage_x + column, l.width - 1);
    const int y = min(g.stage_y + row, l.height - 1);
    bool is_inside = true;
    const int ix = source_index(x, g.view[0].first_x, g.view[0].step_x, g.canvas_left,
                                g.canvas_right, is_inside);
    const int iy = source_index(y, g.view[0].first_y, g.view[0].step_y, g.canvas_top,
                                g.canvas_bottom, is_inside);
    const unsigned offset = unsigned(iy * image.stride_y + ix * image.stride_x);
    Texel texel;
#pragma unroll
    for (int c = 0; c < LANES; ++c) {
      if (c >= CHUNK) {
        texel.lane[c] = Lane(0);
        continue;
      }
      const int here = min(channel + c, CHANNELS - 1);
      if (PADDING == MARGIN_CONSTANT && !is_inside) {
        texel.lane[c] = encode_value(FILLS[PADDING_FILL][here]);
      } else {
        texel.lane[c] = encode(image.base + (offset + unsigned(here * image.stride_c)));
      }
    }
    texels[row * g.stage_row + column] = texel;
  }
}

// What was drawn for one sample, in registers, since stores between two reads of memory
// would make the compiler read anew. What is not used takes none.
struct Numbers {
  float pack[PACK_WIDTH + 1];
};
__device__ Numbers numbers_of(const Arguments& a, int sample) {
  Numbers numbers;
#pragma unroll
  for (int i = 0; i < PACK_WIDTH; ++i)
    numbers.pack[i] = a.pack[(long long)(sample)*PACK_WIDTH + i];
  return numbers;
}

__device__ void change_pixel(float (&value)[CHUNK], int channel, int x, int y,
                             const float* pack, float mean) {
  Values<CHUNK> v = {value, channel, x, y, mean};
  PLAN_PER_PIXEL
}

__device__ float change_value(float value, int channel, int x, int y, const float* pack) {
  float single[1] = {value};
  Values<1> v = {single, channel, x, y, 0.0f};
  PLAN_PER_VALUE
  return single[0];
}

__device__ Output* output_at(const Arguments& a, int sample, int c, int y, int x) {
  const long long height = a.out_height, width = a.out_width;
#if IS_CHANNELS_LAST
  return a.out + ((sample * height + y) * width + x) * CHANNELS + c;
#else
  return a.out + ((sample * (long long)(CHANNELS) + c) * height + y) * width + x;
#endif
}

// Without a blur: read, finish and store. A thread keeps its column, so that what depends
// on x alone is computed once.
template <class Reader>
__device__ void warp_and_store(const Geometry& g, const Reader& source, const Arguments& a,
                               const Numbers& numbers, float mean, int sample,
                               int tile_x, int tile_y) {
  constexpr int ROWS = THREADS / TILE_X;
  static_assert(HAS_BLUR || THREADS % TILE_X == 0, "a thread keeps its column");
  const int x = tile_x + int(threadIdx.x) % TILE_X;
  if (x >= a.out_width) return;
  const int end = min(tile_y + TILE_Y, int(a.out_height));
#pragma unroll 2
  for (int y = tile_y + int(threadIdx.x) / TILE_X; y < end; y += ROWS) {
    float value[CHUNK];
    read_pixel(g, source, x, y, value);
    change_pixel(value, source.channel, x, y, numbers.pack, mean);
    Output* out = output_at(a, sample, source.channel, y, x);
    const long long stride =
        IS_CHANNELS_LAST ? 1 : a.out_height * a.out_width;
#pragma unroll
    for (int c = 0; c < CHUNK; ++c)
      if (CHANNELS % CHUNK == 0 || source.channel + c < CHANNELS)
        out[c * stride] = to_output(change_value(
            value[c], min(source.channel + c, CHANNELS - 1), x, y, numbers.pack));
  }
}

// A mean launch: the sum of the grey values of this thread's pixels.
template <class Reader>
__device__ float warp_and_sum(const Geometry& g, const Reader& source, const Arguments& a,
                              const Numbers& numbers, int tile_x, int tile_y) {
  const int end_x = min(tile_x + TILE_X, int(a.out_width));
  const int end_y = min(tile_y + TILE_Y, int(a.out_height));
  float sum = 0.0f;
#pragma unroll 1
  for (int i = threadIdx.x; i < TILE_X * TILE_Y; i += THREADS) {
    const int x = tile_x + i % TILE_X, y = tile_y + i / TILE_X;
    if (x >= end_x || y >= end_y) continue;
    float value[CHUNK];
    read_pixel(g, source, x, y, value);
    change_pixel(value, source.channel, x, y, numbers.pack, 0.0f);
    sum += Values<CHUNK>{value, source.channel, x, y, 0.0f}.grey();
  }
  return sum;
}

// The sum of every n-th number. Its order is fixed, so it has the same bits each time.
__device__ float sum_every(int n, const float* numbers, int first, int count) {
  float sum = 0.0f;
  for (int i = first; i < count; i += n) sum += numbers[i];
  return sum;
}

// With a blur: the tile and its margin go to shared memory, one plane per channel.
template <class Reader>
__device__ void warp(const Geometry& g, const Reader& source, const Arguments& a,
                     const Numbers& numbers, float mean, int tile_x, int tile_y,
                     float* planes) {
  const int width = int(a.out_width), height = int(a.out_height);
#pragma unroll 1
  for (int i = threadIdx.x; i < HALO_X * HALO_Y; i += THREADS) {
    const int row = i / HALO_X, column = i % HALO_X;
    int x = tile_x - RADIUS_X + column, y = tile_y - RADIUS_Y + row;
    float value[CHUNK];
    bool is_black = false;
    if (!g.is_inner) {
      is_black = BLUR_MARGIN == MARGIN_CONSTANT &&
                 (x < 0 || y < 0 || x >= width || y >= height);
      // The second limit matters only for pixels that no output needs.
      x = min(max(wrap(x, width), g.left), g.right);
      y = min(max(wrap(y, height), g.top), g.bottom);
    }
    read_pixel(g, source, x, y, value);
    change_pixel(value, source.channel, x, y, numbers.pack, mean);
#pragma unroll
    for (int c = 0; c < CHUNK; ++c)
      planes[c * PLANE + row * ROW + column] = is_black ? 0.0f : value[c];
  }
}

// One strip, 4 pixels wide and STRIP high, of one channel.
__device__ void blur(const Geometry& g, const float* planes, const Arguments& a, int sample,
                     int channel, int tile_x, int tile_y) {
  constexpr int QUADS = TILE_X / 4, STRIPS = TILE_Y / STRIP;
  constexpr int LOADS = (4 + 2 * RADIUS_X + 3) / 4;
  static_assert(TILE_X + 4 * LOADS - 4 <= ROW && TILE_Y % STRIP == 0, "strips fit");
  static_assert(THREADS >= 64, "the second warp finds the weights");
  const float* pack = a.pack + (long long)(sample) * PACK_WIDTH;
  const int height = int(a.out_height), width = int(a.out_width);
  const bool is_whole = !IS_CHANNELS_LAST && width % 4 == 0;
  float wx[RADIUS_X + 1], wy[RADIUS_Y + 1];
#pragma unroll
  for (int d = 0; d <= RADIUS_X; ++d) wx[d] = g.weight_x[d];
#pragma unroll
  for (int d = 0; d <= RADIUS_Y; ++d) wy[d] = g.weight_y[d];

#pragma unroll 1
  for (int item = threadIdx.x; item < CHUNK * QUADS * STRIPS; item += THREADS) {
    const int quad = item % QUADS, strip = item / QUADS % STRIPS;
    const int c = item / (QUADS * STRIPS), here = channel + c;
    if (CHANNELS % CHUNK != 0 && here >= CHANNELS) continue;
    const int x = tile_x + 4 * quad, y0 = tile_y + strip * STRIP;
    if (x >= width || y0 >= height) continue;
    const float* row = planes + c * PLANE + strip * STRIP * ROW + 4 * quad;
    float sum[STRIP][4];
#pragma unroll
    for (int r = 0; r < STRIP + 2 * RADIUS_Y; ++r, row += ROW) {
      float in[4 * LOADS];
#pragma unroll
      for (int i = 0; i < LOADS; ++i) load_quad(row + 4 * i, in + 4 * i);
      float across[4];
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        across[q] = wx[RADIUS_X] * in[q];
#pragma unroll
        for (int k = 1; k <= 2 * RADIUS_X; ++k)
          across[q] = fmaf(wx[k < RADIUS_X ? RADIUS_X - k : k - RADIUS_X], in[q + k],
                           across[q]);
      }
      // This row is tap r - j of output row j.
#pragma unroll
      for (int j = 0; j < STRIP; ++j) {
        const int k = r - j;
        if (k < 0 || k > 2 * RADIUS_Y) continue;
        const float w = wy[k < RADIUS_Y ? RADIUS_Y - k : k - RADIUS_Y];
#pragma unroll
        for (int q = 0; q < 4; ++q)
          sum[j][q] = k == 0 ? w * across[q] : fmaf(w, across[q], sum[j][q]);
      }
      const int done = r - 2 * RADIUS_Y;
      if (done < 0 || y0 + done >= height) continue;
      float value[4];
#pragma unroll
      for (int q = 0; q < 4; ++q)
        value[q] = change_value(sum[done][q], here, x + q, y0 + done, pack);
      Output* out = output_at(a, sample, here, y0 + done, x);
      if (is_whole) {
        store_quad(out, value);
      } else {
#pragma unroll
        for (int q = 0; q < 4; ++q)
          if (x + q < width) out[IS_CHANNELS_LAST ? q * CHANNELS : q] = to_output(value[q]);
      }
    }
  }
}

// Where a mean launch leaves the sum of this block: (B, rows of blocks, blocks in a row).
__device__ Output* sum_at(const Arguments& a) {
  const long long tiles_x = (a.out_width + TILE_X - 1) / TILE_X;
  const long long rows = (a.out_height + TILE_Y - 1) / TILE_Y * CHUNKS;
  return a.out + (blockIdx.z * rows + blockIdx.y) * tiles_x + blockIdx.x;
}

#if PLAN_HAS_MEAN
#define MEAN_PARAMETERS , const float *sums, long long num_sums
#define MEAN_ARGUMENTS , sums, num_sums
#else
#define MEAN_PARAMETERS
#define MEAN_ARGUMENTS
#endif

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) augment(
    const Source* source, Output* out, const float* pack, const Image* images,
    long long height, long long width, long long stride_b, long long stride_c,
    long long stride_y, long long stride_x, long long out_height,
    long long out_width MEAN_PARAMETERS) {
  const Arguments a = {source,   out,      pack,     images,     height,
                       width,    stride_b, stride_c, stride_y,   stride_x,
                       out_height, out_width MEAN_ARGUMENTS};
  // The blur's planes come first: they are read 16 bytes at a time.
  DYNAMIC_SHARED(memory);
  float* planes = reinterpret_cast<float*>(memory);
  Texel* texels = reinterpret_cast<Texel*>(memory + (HAS_BLUR ? CHUNK * PLANE * 4 : 0));
  STATIC_SHARED Geometry g;
  constexpr int PARTS = 32;  // threads that add up many numbers, before one adds up theirs
  STATIC_SHARED float parts[PARTS], mean;

  const int sample = blockIdx.z;
  const int channel = int(blockIdx.y) % CHUNKS * CHUNK;
  const int tile_x = int(blockIdx.x) * TILE_X, tile_y = int(blockIdx.y) / CHUNKS * TILE_Y;

  PHASE {
    const int t = threadIdx.x;
    if (t == 0) prepare(g, a, sample, tile_x, tile_y);
    // Another warp, so that both run at once.
    if (HAS_BLUR && t >= 32 && t <= 32 + RADIUS_X)
      find_weight<RADIUS_X>(g.weight_x, a, sample, t - 32);
    if (HAS_BLUR && t >= 48 && t <= 48 + RADIUS_Y)
      find_weight<RADIUS_Y>(g.weight_y, a, sample, t - 48);
    if (HAS_MEAN && t >= THREADS - PARTS)
      parts[t - (THREADS - PARTS)] = sum_every(PARTS, a.sums + sample * a.num_sums,
                                               t - (THREADS - PARTS), int(a.num_sums));
  }
  BARRIER();
  if constexpr (HAS_MEAN) {
    PHASE {
      if (threadIdx.x == 0)
        mean = sum_every(1, parts, 0, PARTS) / (float(a.out_width) * float(a.out_height));
    }
    BARRIER();
  }
  if constexpr (STAGE_TEXELS > 0) {
    PHASE {
      if (g.is_staged) stage(g, image_of(a, sample), texels, channel);
    }
    BARRIER();
  }
  if constexpr (IS_MEAN) {
    STATIC_SHARED float sums[THREADS];
    PHASE {
      const Direct direct = {g, channel, image_of(a, sample)};
      const Staged staged = {g, channel, texels};
      const Numbers numbers = numbers_of(a, sample);
      sums[threadIdx.x] = STAGE_TEXELS > 0 && g.is_staged
                              ? warp_and_sum(g, staged, a, numbers, tile_x, tile_y)
                              : warp_and_sum(g, direct, a, numbers, tile_x, tile_y);
    }
    BARRIER();
    PHASE {
      if (threadIdx.x < PARTS)
        parts[threadIdx.x] = sum_every(PARTS, sums, threadIdx.x, THREADS);
    }
    BARRIER();
    PHASE {
      if (threadIdx.x == 0) *sum_at(a) = to_output(sum_every(1, parts, 0, PARTS));
    }
    return;
  }
  PHASE {
    const Direct direct = {g, channel, image_of(a, sample)};
    const Staged staged = {g, channel, texels};
    const Numbers numbers = numbers_of(a, sample);
    if constexpr (HAS_BLUR) {
      if (STAGE_TEXELS > 0 && g.is_staged)
        warp(g, staged, a, numbers, mean, tile_x, tile_y, planes);
      else
        warp(g, direct, a, numbers, mean, tile_x, tile_y, planes);
    } else {
      if (STAGE_TEXELS > 0 && g.is_staged)
        warp_and_store(g, staged, a, numbers, mean, sample, tile_x, tile_y);
      else
        warp_and_store(g, direct, a, numbers, mean, sample, tile_x, tile_y);
    }
  }
  if constexpr (HAS_BLUR) {
    BARRIER();
    PHASE { blur(g, planes, a, sample, channel, tile_x, tile_y); }
  }
}
