/* Preloaded into a server, this moves its wall clock by as many microseconds as
 * stand in the file named by the environment. The monotonic clock goes on. */
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *offset;

__attribute__((constructor)) static void start(void) {
	const char *name = getenv("DLM_TEST_CLOCK");
	int fd = name ? open(name, O_RDONLY) : -1;
	if (fd < 0) return;
	void *p = mmap(NULL, sizeof *offset, PROT_READ, MAP_SHARED, fd, 0);
	close(fd);
	if (p != MAP_FAILED) offset = p;
}

int gettimeofday(struct timeval *restrict tv, void *restrict tz) {
	struct timespec ts;
	(void)tz;
	clock_gettime(CLOCK_REALTIME, &ts);
	int64_t us = ts.tv_sec * INT64_C(1000000) + ts.tv_nsec / 1000 + (offset ? *offset : 0);
	tv->tv_sec = us / 1000000;
	tv->tv_usec = us % 1000000;
	return 0;
}
