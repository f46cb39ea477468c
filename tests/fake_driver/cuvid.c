/* The video library of that driver. Its parser takes each packet for a picture, and shows pictures in the order of
 * their times. They tell which one they are: the luma of the n-th picture that a decoder was given is 16 + n % 200,
 * its chroma U = 80 + n % 50 and V = 160 + n % 50. What lies beside the picture is 0xEE. */
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Whether the caller holds the GIL, of the Python that loads this library. */
extern int PyGILState_Check(void);

/* Many threads call. */
#define ADD(counter, number) __atomic_add_fetch(&(counter), number, __ATOMIC_SEQ_CST)

enum { OK = 0, MAP_FAILED = 205, MOST_SURFACES = 64 };

/* Settings. */
long long fake_cuvid_create_error = 0;   /* what the creation of a decoder returns */
long long fake_cuvid_sessions = 1 << 20; /* more decoders than these fail with fake_cuvid_session_error */
long long fake_cuvid_session_error = 2;
long long fake_cuvid_decode_error = 0;   /* what decoding a picture returns ... */
long long fake_cuvid_good_pictures = 0;  /* ... after so many good ones of all decoders */
long long fake_cuvid_supported = 1;      /* whether the hardware knows the codec */
long long fake_cuvid_least = 16;         /* width and height that it decodes at least */
long long fake_cuvid_wide = 64, fake_cuvid_high = 64, fake_cuvid_depth = 0; /* what the parser finds in the headers */
long long fake_cuvid_left = 0, fake_cuvid_below = 0, fake_cuvid_chroma = 1, fake_cuvid_matrix = 2;
long long fake_cuvid_surfaces = 5;       /* that the stream needs at least; no decoder has more than 32 */
long long fake_cuvid_delay = 3;          /* pictures that the parser holds to put them in order */
long long fake_cuvid_late = 0;           /* what it adds to the times */
long long fake_cuvid_map_error = 0;      /* what mapping a picture returns */
long long fake_cuvid_damaged = -1;       /* the picture of a decoder that has errors */
long long fake_cuvid_interrupted = 0;    /* the call of the parser before which a Ctrl-C comes: 1, 2, 3; 4 as it maps */
long long fake_cuvid_parse_error = 0, fake_cuvid_shows = 1;
long long fake_cuvid_caps_error = 0, fake_cuvid_parser_error = 0; /* what these return */

/* Counters. */
long long fake_cuvid_created = 0, fake_cuvid_destroyed = 0, fake_cuvid_pictures = 0, fake_cuvid_mapped = 0;
long long fake_cuvid_parsers = 0, fake_cuvid_misused = 0; /* calls with a decoder that is destroyed */
long long fake_cuvid_held = 0; /* calls that may wait for the hardware, with the GIL */

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

typedef struct {
    int codec;
    unsigned rate[2];
    unsigned char progressive, depth, chroma_depth, surfaces;
    unsigned wide, high;
    int left, top, right, bottom, chroma;
    unsigned bitrate;
    int aspect[2];
    unsigned char signal, primaries, transfer, matrix;
    unsigned more;
} Format;

typedef struct { int surface, progressive, top_first, repeat; long long time; } Shown;

typedef struct {
    int codec;
    unsigned surfaces, clock, threshold, delay, flags, reserved[4];
    void *user;
    int (*sequence)(void *, Format *);
    int (*decode)(void *, Picture *);
    int (*display)(void *, Shown *);
} Callbacks;

typedef struct { unsigned long flags, size; const unsigned char *data; long long time; } Packet;

typedef struct { Callbacks calls; int surfaces, next, held; long long last; Shown waiting[MOST_SURFACES]; } Parser;

typedef struct { Wanted wanted; unsigned count, numbers[MOST_SURFACES]; long long mapped; int is_destroyed; } Decoder;

int cuvidGetDecoderCaps(Caps *caps)
{
    if (fake_cuvid_caps_error) return (int)fake_cuvid_caps_error;
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
    if (wanted->surfaces > 32) return 1;
    if (fake_cuvid_created - fake_cuvid_destroyed >= fake_cuvid_sessions) return (int)fake_cuvid_session_error;
    *decoder = calloc(1, sizeof **decoder);
    (*decoder)->wanted = *wanted;
    ADD(fake_cuvid_created, 1);
    return OK;
}

int cuvidDestroyDecoder(Decoder *decoder)
{
    /* Its memory is kept, so that a later use is seen. */
    ADD(fake_cuvid_misused, decoder->is_destroyed);
    decoder->is_destroyed = 1;
    ADD(fake_cuvid_mapped, -decoder->mapped);
    ADD(fake_cuvid_destroyed, 1);
    return OK;
}

int cuvidDecodePicture(Decoder *decoder, const Picture *picture)
{
    ADD(fake_cuvid_held, PyGILState_Check());
    if (fake_cuvid_decode_error && fake_cuvid_pictures >= fake_cuvid_good_pictures)
        return (int)fake_cuvid_decode_error;
    if (!picture->is_second) {
        decoder->numbers[picture->surface % MOST_SURFACES] = decoder->count++;
        ADD(fake_cuvid_pictures, 1);
    }
    return OK;
}

static void interrupt(int call)
{
    if (fake_cuvid_interrupted == call) raise(SIGINT);
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
    ADD(fake_cuvid_held, PyGILState_Check());
    if (fake_cuvid_map_error) return (int)fake_cuvid_map_error;
    if (ADD(decoder->mapped, 1) > (long long)wanted->outputs) {
        ADD(decoder->mapped, -1);
        return MAP_FAILED;
    }
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
    interrupt(4);
    return OK;
}

int cuvidUnmapVideoFrame64(Decoder *decoder, unsigned long long address)
{
    ADD(fake_cuvid_misused, decoder->is_destroyed);
    free((void *)(uintptr_t)address);
    ADD(decoder->mapped, -1);
    ADD(fake_cuvid_mapped, -1);
    return OK;
}

int cuvidGetDecodeStatus(Decoder *decoder, int surface, int *status)
{
    *status = decoder->numbers[surface % MOST_SURFACES] == fake_cuvid_damaged ? 8 : 2;
    return OK;
}

int cuvidCreateVideoParser(Parser **parser, const Callbacks *calls)
{
    if (fake_cuvid_parser_error) return (int)fake_cuvid_parser_error;
    *parser = calloc(1, sizeof **parser);
    (*parser)->calls = *calls;
    (*parser)->last = -1LL << 62;
    ADD(fake_cuvid_parsers, 1);
    return OK;
}

int cuvidDestroyVideoParser(Parser *parser)
{
    free(parser);
    ADD(fake_cuvid_parsers, -1);
    return OK;
}

static int show(Parser *parser)
{
    int first = 0;
    for (int i = 1; i < parser->held; i++)
        if (parser->waiting[i].time < parser->waiting[first].time) first = i;
    Shown shown = parser->waiting[first];
    parser->waiting[first] = parser->waiting[--parser->held];
    /* As in NVIDIA's parser, times grow from picture to picture. */
    if (shown.time <= parser->last) shown.time = parser->last + 333333;
    parser->last = shown.time;
    shown.time += fake_cuvid_late;
    interrupt(3);
    return fake_cuvid_shows ? parser->calls.display(parser->calls.user, &shown) : 1;
}

int cuvidParseVideoData(Parser *parser, const Packet *packet)
{
    void *user = parser->calls.user;
    if (packet->flags & 1) {
        while (parser->held)
            if (!show(parser)) return 999;
        return OK;
    }
    if (fake_cuvid_parse_error) return (int)fake_cuvid_parse_error;
    if (!parser->surfaces) {
        Format format = {.codec = parser->calls.codec, .progressive = 1, .surfaces = (unsigned char)fake_cuvid_surfaces};
        format.depth = format.chroma_depth = (unsigned char)fake_cuvid_depth;
        format.wide = (unsigned)(fake_cuvid_left + fake_cuvid_wide);
        format.high = (unsigned)(fake_cuvid_high + fake_cuvid_below);
        format.left = (int)fake_cuvid_left;
        format.right = (int)format.wide;
        format.bottom = (int)fake_cuvid_high;
        format.chroma = (int)fake_cuvid_chroma;
        format.primaries = format.transfer = 2;
        format.matrix = (unsigned char)fake_cuvid_matrix;
        interrupt(1);
        parser->surfaces = parser->calls.sequence(user, &format);
        if (!parser->surfaces) return 999;
    }
    Picture picture = {.surface = parser->next++ % parser->surfaces};
    interrupt(2);
    if (!parser->calls.decode(user, &picture)) return 999;
    long long time = packet->flags & 2 ? packet->time : 1LL << 62;
    parser->waiting[parser->held++] = (Shown){picture.surface, 1, 0, 0, time};
    return parser->held > fake_cuvid_delay && !show(parser) ? 999 : OK;
}

#define UNUSED(name) int name(void) { return 999; }
#define FOUR(a, b, c, d) UNUSED(a) UNUSED(b) UNUSED(c) UNUSED(d)
FOUR(cuvidCreateVideoSource, cuvidCreateVideoSourceW, cuvidCtxLock, cuvidCtxLockDestroy)
FOUR(cuvidCtxUnlock, cuvidDestroyVideoSource, cuvidGetSourceAudioFormat, cuvidGetSourceVideoFormat)
FOUR(cuvidGetVideoSourceState, cuvidReconfigureDecoder, cuvidSetVideoSourceState, cuvidCtxLockCreate)
