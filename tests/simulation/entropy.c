/* Replaces the system's source of randomness in a simulation: the standard library's hash maps, and everything that
   rangecache and tokio derive from them, then depend on the seed alone. Loaded by LD_PRELOAD into that process only. */

#include <stdint.h>
#include <stdlib.h>
#include <sys/types.h>

/* Each call returns the same bytes, whatever thread asks and however often. */
ssize_t getrandom(void *buffer, size_t length, unsigned int flags) {
    (void)flags;
    const char *seed = getenv("SIMULATION_SEED");
    uint64_t state = seed ? strtoull(seed, NULL, 10) : 0;
    unsigned char *bytes = buffer;
    for (size_t i = 0; i < length; i++) {
        /* splitmix64 */
        uint64_t mixed = state += 0x9e3779b97f4a7c15u;
        mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9u;
        mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebu;
        bytes[i] = (unsigned char)(mixed ^ (mixed >> 31));
    }
    return (ssize_t)length;
}
