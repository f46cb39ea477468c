// Planes of YUV become RGB of any size in one pass.
//
// One thread makes one pixel of the result. For each of its three components it takes a weighted sum over a
// window of samples; the windows and weights of each column and row come from tables, which hold all that
// differs between sizes, filters and places of chroma. Then a matrix makes RGB of the three.
//
// A part of a result is a part of the tables. Crops, mirrored and turned frames are addresses and steps, which may
// be negative.
//
// The arithmetic is IEEE float32 without fused multiply-add, in the order written here. The reference in
// tests/color_reference.py does the same operations in the same order, and so gives the same bits. Compile with
// --fmad=false (NVRTC, nvcc) or -ffp-contract=off (C++).
//
// The structs are filled by color.py. The package brings yuv_to_rgb.ptx, made of this file by
// tests/color_kernel.py, which the driver compiles for the device at hand: change both together.

struct Axis {
    const int* first;      // [size] the sample at which the window of each place begins
    const float* weights;  // [taps][size], so that neighbouring threads read neighbours
    int taps;
    int size;
};

struct Plane {
    const unsigned char* data;
    long long row_step;    // bytes from a row to the next; negative if rows run upwards
    long long sample_step; // bytes from a sample to the next
};

struct Frame {
    Plane planes[3];  // Y, U, V; without taps for chroma, only Y is read
    void* out;
};

struct Conversion {
    Frame frames[16];  // those of one launch, by blockIdx.z
    Axis luma_x, luma_y, chroma_x, chroma_y;
    long long out_row, out_pixel, out_channel;  // steps in the result, in elements
    float matrix[3][4];                         // channel = m[0] Y + m[1] U + m[2] V + m[3], 0 to 255
    float scale[3], bias[3];                    // of float results: channel * scale + bias
    float ceiling;                              // what a row gives at most
    int shift;                                  // unused bits below those of a sample
};

template <typename Sample>
__device__ float resample(const Plane& plane, const Axis& across, const Axis& down, int x, int y,
                          const Conversion& c) {
    const unsigned char* window = plane.data + across.first[x] * plane.sample_step;
    float sum = 0.0f;
    for (int j = 0; j < down.taps; ++j) {
        const unsigned char* row = window + (down.first[y] + j) * plane.row_step;
        float line = 0.0f;
        for (int i = 0; i < across.taps; ++i) {
            const Sample sample = *(const Sample*)(row + i * plane.sample_step);
            line = line + across.weights[i * across.size + x] * (float)(sample >> c.shift);
        }
        sum = sum + down.weights[j * down.size + y] * fminf(line, c.ceiling);
    }
    return sum;
}

__device__ void store(unsigned char* out, float value, float, float) {
    *out = (unsigned char)rintf(value);
}

__device__ void store(float* out, float value, float scale, float bias) {
    *out = value * scale + bias;
}

template <typename Sample, typename Out>
__device__ void convert(const Conversion& c) {
    const int x = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    const int y = (int)(blockIdx.y * blockDim.y + threadIdx.y);
    if (x >= c.luma_x.size || y >= c.luma_y.size) return;
    const Frame& frame = c.frames[blockIdx.z];
    float yuv[3];
#pragma unroll 1
    for (int k = 0; k < 3; ++k)
        yuv[k] = resample<Sample>(frame.planes[k], k ? c.chroma_x : c.luma_x, k ? c.chroma_y : c.luma_y, x, y, c);
    Out* out = (Out*)frame.out + y * c.out_row + x * c.out_pixel;
    for (int k = 0; k < 3; ++k) {
        const float* m = c.matrix[k];
        const float value = m[0] * yuv[0] + m[1] * yuv[1] + m[2] * yuv[2] + m[3];
        store(out + k * c.out_channel, fminf(fmaxf(value, 0.0f), 255.0f), c.scale[k], c.bias[k]);
    }
}

// One plane, scaled: U and V of a result that stays YUV. scale[0] is the largest sample.
template <typename Sample>
__device__ void rescale(const Conversion& c) {
    const int x = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    const int y = (int)(blockIdx.y * blockDim.y + threadIdx.y);
    if (x >= c.luma_x.size || y >= c.luma_y.size) return;
    const Frame& frame = c.frames[blockIdx.z];
    const float value = resample<Sample>(frame.planes[0], c.luma_x, c.luma_y, x, y, c);
    Sample* out = (Sample*)frame.out + y * c.out_row + x * c.out_pixel;
    *out = (Sample)((unsigned)rintf(fminf(fmaxf(value, 0.0f), c.scale[0])) << c.shift);
}

extern "C" __global__ void yuv8_to_uint8(const Conversion c) {
    convert<unsigned char, unsigned char>(c);
}

extern "C" __global__ void yuv8_to_float32(const Conversion c) {
    convert<unsigned char, float>(c);
}

extern "C" __global__ void yuv16_to_uint8(const Conversion c) {
    convert<unsigned short, unsigned char>(c);
}

extern "C" __global__ void yuv16_to_float32(const Conversion c) {
    convert<unsigned short, float>(c);
}

extern "C" __global__ void plane8(const Conversion c) {
    rescale<unsigned char>(c);
}

extern "C" __global__ void plane16(const Conversion c) {
    rescale<unsigned short>(c);
}
