/* The video library of that driver. Any stream decodes to pictures that tell which one they are: the luma of the
 * n-th picture that a decoder was given is 16 + n % 200, its chroma U = 80 + n % 50 and V = 160 + n % 50. What lies
 * beside the picture is 0xEE. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* FFmpeg calls from many threads. */
#define ADD(counter, number) __atomic_add_fetch(&(counter), number, __ATOMIC_SEQ_CST)

enum { OK = 0, MOST_SURFACES = 64 };

/* Settings. */
long long fake_cuvid_create_error = 0;   /* what the creation of a decoder returns */
long long fake_cuvid_sessions = 1 << 20; /* more decoders than these fail with fake_cuvid_session_error */
long long fake_cuvid_session_error = 2;
long long fake_cuvid_decode_error = 0;   /* what decoding a picture returns ... */
long long fake_cuvid_good_pictures = 0;  /* ... after so many good ones of all decoders */
long long fake_cuvid_supported = 1;      /* whether the hardware knows the codec */
long long fake_cuvid_least = 16;         /* width and height that it decodes at least */

/* Counters. */
long long fake_cuvid_created = 0, fake_cuvid_destroyed = 0, fake_cuvid_pictures = 0, fake_cuvid_mapped = 0;

typedef struct {
    int codec, chroma;
    unsigned bits, reserved[3];
    unsigned char supported, engines;
    unsigned short outputs;
    unsigned most_wide, most_high, most_blocks;
    unsigned short least_wide, least_high;
} Caps;

typedef struct {
    unsigned long width, height, surfaces;
    int codec, chroma;
    unsigned long flags, bits, intra, most_wide, most_high, reserved;
    short area[4];
    int output, deinterlace;
    unsigned long out_width, out_height, outputs;
} Wanted;

typedef struct { int blocks_wide, blocks_high, surface, is_field, is_bottom, is_second; } Picture;

typedef struct { Wanted wanted; unsigned count, numbers[MOST_SURFACES]; } Decoder;

int cuvidGetDecoderCaps(Caps *caps)
{
    caps->supported = (unsigned char)fake_cuvid_supported;
    caps->engines = 1;
    caps->outputs = 15;
    caps->most_wide = caps->most_high = 8192;
    caps->most_blocks = 1 << 18;
    caps->least_wide = caps->least_high = (unsigned short)fake_cuvid_least;
    return OK;
}

int cuvidCreateDecoder(Decoder **decoder, const Wanted *wanted)
{
    if (fake_cuvid_create_error) return (int)fake_cuvid_create_error;
    if (fake_cuvid_created - fake_cuvid_destroyed >= fake_cuvid_sessions) return (int)fake_cuvid_session_error;
    *decoder = calloc(1, sizeof **decoder);
    (*decoder)->wanted = *wanted;
    ADD(fake_cuvid_created, 1);
    return OK;
}

int cuvidDestroyDecoder(Decoder *decoder)
{
    free(decoder);
    ADD(fake_cuvid_destroyed, 1);
    return OK;
}

int cuvidDecodePicture(Decoder *decoder, const Picture *picture)
{
    if (fake_cuvid_decode_error && fake_cuvid_pictures >= fake_cuvid_good_pictures)
        return (int)fake_cuvid_decode_error;
    if (!picture->is_second) {
        decoder->numbers[picture->surface % MOST_SURFACES] = decoder->count++;
        ADD(fake_cuvid_pictures, 1);
    }
    return OK;
}

static void put(unsigned char *at, unsigned value, unsigned bytes)
{
    at[bytes - 1] = (unsigned char)value; /* the high bits of a deep sample */
    if (bytes == 2) at[0] = 0;
}

int cuvidMapVideoFrame64(Decoder *decoder, int surface, unsigned long long *address, unsigned *pitch, void *how)
{
    const Wanted *wanted = &decoder->wanted;
    unsigned number = decoder->numbers[surface % MOST_SURFACES], bytes = wanted->output == 1 ? 2 : 1;
    unsigned long width = wanted->out_width, height = wanted->out_height, rows = (height + 1) / 2;
    size_t line = (width * bytes + 511) / 512 * 512, size = line * 3 * rows;
    unsigned char *memory = aligned_alloc(512, (size + 511) / 512 * 512);
    memset(memory, 0xEE, size);
    for (unsigned long y = 0; y < height; y++)
        for (unsigned long x = 0; x < width; x++)
            put(memory + y * line + x * bytes, 16 + number % 200, bytes);
    /* Hardware puts chroma below an even number of rows of luma. */
    for (unsigned long y = 0; y < rows; y++)
        for (unsigned long x = 0; x < (width + 1) / 2 * 2; x++)
            put(memory + (2 * rows + y) * line + x * bytes, (x % 2 ? 160 : 80) + number % 50, bytes);
    *address = (unsigned long long)(uintptr_t)memory;
    *pitch = (unsigned)line;
    ADD(fake_cuvid_mapped, 1);
    return OK;
}

int cuvidUnmapVideoFrame64(Decoder *decoder, unsigned long long address)
{
    free((void *)(uintptr_t)address);
    ADD(fake_cuvid_mapped, -1);
    return OK;
}

#define UNUSED(name) int name(void) { return 999; }
#define FOUR(a, b, c, d) UNUSED(a) UNUSED(b) UNUSED(c) UNUSED(d)
FOUR(cuvidCreateVideoParser, cuvidCreateVideoSource, cuvidCreateVideoSourceW, cuvidCtxLock)
FOUR(cuvidCtxLockDestroy, cuvidCtxUnlock, cuvidDestroyVideoParser, cuvidDestroyVideoSource)
FOUR(cuvidGetDecodeStatus, cuvidGetSourceAudioFormat, cuvidGetSourceVideoFormat, cuvidGetVideoSourceState)
FOUR(cuvidParseVideoData, cuvidReconfigureDecoder, cuvidSetVideoSourceState, cuvidCtxLockCreate)
