// Command probe is what the test cluster's own tests run in pods: a static program that
// needs no shell. `serve` answers with the pod's name; the others do one thing and end.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"
)

func serve(address string) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	server := &http.Server{Addr: address, Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, os.Getenv("HOSTNAME"))
	})}
	go func() {
		<-ctx.Done()
		server.Close()
	}()
	if err := server.ListenAndServe(); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

func get(url string) error {
	client := &http.Client{Timeout: 5 * time.Second}
	answer, err := client.Get(url)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	_, err = io.Copy(os.Stdout, answer.Body)
	return err
}

func run(words []string) error {
	switch {
	case len(words) == 2 && words[0] == "serve":
		return serve(words[1])
	case len(words) == 2 && words[0] == "get":
		return get(words[1])
	case len(words) == 2 && words[0] == "env":
		fmt.Println(os.Getenv(words[1]))
		return nil
	case len(words) == 3 && words[0] == "write":
		return os.WriteFile(words[1], []byte(words[2]), 0o644)
	}
	return errors.New("usage: probe serve ADDRESS | get URL | env NAME | write FILE TEXT")
}

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
