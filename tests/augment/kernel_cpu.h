// Runs kernel.cu on the CPU: each PHASE is a loop over the block's threads.
#include <algorithm>
#include <cmath>
#include <cstring>

#define ON_CPU 1
#define IS_HOPPER 0
#define __device__
#define __global__
#define __constant__ static const
#define __launch_bounds__(threads, blocks)

using std::max;
using std::min;
typedef unsigned short Bits16;
struct uint2 { unsigned x, y; };
struct float4 { float x, y, z, w; };
struct Index { int x = 0, y = 0, z = 0; };
static Index threadIdx, blockIdx;

#define PHASE for (threadIdx.x = 0; threadIdx.x < THREADS; ++threadIdx.x)
#define BARRIER()
#define STATIC_SHARED static
#define DYNAMIC_SHARED(name) alignas(16) static unsigned char name[1 << 18]

template <class To, class From>
static To bits_of(From from) {
  static_assert(sizeof(To) == sizeof(From), "");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}
static float __int_as_float(int bits) { return bits_of<float>(bits); }
static int __float_as_int(float value) { return bits_of<int>(value); }
static float __saturatef(float v) { return v > 0.0f ? (v < 1.0f ? v : 1.0f) : 0.0f; }
static float __fadd_rd(float a, float b) {  // for b = 1.5 * 2^23: floor(a) + b
  return std::floor(a) + b;
}
static float __fdividef(float a, float b) { return a / b; }
static float half_to_float(Bits16 bits) { return float(bits_of<_Float16>(bits)); }
static Bits16 float_to_half(float value) { return bits_of<Bits16>(_Float16(value)); }
static Bits16 float_to_bfloat(float value) {  // round to nearest even; no NaN here
  unsigned bits = bits_of<unsigned>(value);
  return Bits16((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
template <class Value>
static Value __ldg(const Value* address) {
  return *address;
}
template <class Vector>
static Vector read_as(const void* address) {
  Vector value;
  std::memcpy(&value, address, sizeof value);
  return value;
}
template <class Vector>
static void write_as(void* address, Vector value) {
  std::memcpy(address, &value, sizeof value);
}
